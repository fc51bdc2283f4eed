"""Watches for modules that reach, while they are called, for what is autograd's: hooks on tensors, gradients of
parameters.

Inside a call that runs as one unit a hook would be registered at the owner alone, and a gradient be that of earlier
micro-batches, whose backwards have not run. Such a module is called part by part, where both are recorded.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch import nn

from farspan.call.leaf import LeakError
from farspan.torch_private import watch_fakes

__all__ = ["install_watch_on_fakes", "out_of_autograds_reach"]


class _Here(threading.local):
    is_refused = False


_here = _Here()


@contextlib.contextmanager
def out_of_autograds_reach() -> Iterator[None]:
    """Let no hook be registered on a fake tensor in the body, and no gradient of a fake parameter be touched.

    Raises:
        LeakError: One was.
    """
    before, _here.is_refused = _here.is_refused, True
    try:
        yield
    finally:
        _here.is_refused = before


def install_watch_on_fakes() -> None:
    """Watch all fake tensors of the process."""
    watch_fakes(_check_hook, _check_gradient)


def _check_hook(tensor: Any) -> None:
    if _here.is_refused:
        raise LeakError("a module registers a hook on a tensor while it is called")


def _check_gradient(tensor: Any) -> None:
    if _here.is_refused and isinstance(tensor, nn.Parameter):
        raise LeakError("a module reads or changes the gradient of a parameter while it is called")
