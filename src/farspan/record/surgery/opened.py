"""Modules that reach outside themselves: from the first call that shows it, their parts are called one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from farspan.call.leaf import Leaf
from farspan.call.naming import name_of
from farspan.call.user_hooks import without_user_hooks

if TYPE_CHECKING:
    from farspan.call.leaf import Target
    from farspan.record.recording import Recording

__all__ = ["call_parts"]


def call_parts(recorder: Recording, target: Target, given: tuple[Any, ...], reason: str) -> Any:
    """Call the parts of what was to be one call, now and from now on.

    Raises:
        RecordError: It is no module.
    """
    if type(target) is not Leaf:
        what = f"{name_of(target)} cannot run as one call: {reason.rstrip('.')}"
        recorder.refuse(what, hint="name the place around the call")
    target.is_open = True
    recorder.frame.take_back(target.key, is_apart=recorder.is_evaluation(target.module))
    with without_user_hooks(target.module):  # which run around this call, if there are any
        return nn.Module.__call__(target.module, *given[0], **given[1])  # its own `__call__` is running
