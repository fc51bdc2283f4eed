"""Hooks that a module registers on tensors while it is called: it is then called part by part, and they are recorded.

Inside a call that runs as one unit they would be autograd's, at the owner alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from farspan.lazy.leaf import LeakError
from farspan.lazy.torch_private import watch_hooks_on_fakes

__all__ = ["install_hooks_on_fakes", "without_hooks_on_tensors"]


class _Here(threading.local):
    is_refused = False


_here = _Here()


@contextlib.contextmanager
def without_hooks_on_tensors() -> Iterator[None]:
    """Let no hook be registered on a fake tensor in the body.

    Raises:
        LeakError: One was.
    """
    before, _here.is_refused = _here.is_refused, True
    try:
        yield
    finally:
        _here.is_refused = before


def install_hooks_on_fakes() -> None:
    """Watch all fake tensors of the process."""
    watch_hooks_on_fakes(_check)


def _check(tensor: Any) -> None:
    if _here.is_refused:
        raise LeakError("a module registers a hook on a tensor while it is called")
