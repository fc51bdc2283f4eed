"""Regions of autocast, and the casts that torch keeps in them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from torch._C import _is_any_autocast_enabled

__all__ = ["autocast_region", "forget_casts", "in_autocast_region", "is_any_autocast_enabled", "watch_autocast_regions"]


class _Regions(threading.local):
    ended = 0


_regions = _Regions()
forget_casts: Callable[[], None] = torch.clear_autocast_cache
"""Drop what autocast has cast, which it keeps until the outermost region is left."""


def watch_autocast_regions() -> None:
    """Begin to count the autocast regions that a thread leaves: torch drops its casts then."""

    def clear_autocast_cache() -> None:
        _regions.ended += 1
        forget_casts()

    torch.clear_autocast_cache = clear_autocast_cache


is_any_autocast_enabled: Callable[[], bool] = _is_any_autocast_enabled
"""Returns whether autocast is on for some kind of device."""


def autocast_region() -> int:
    """Returns the number of the outermost autocast region that this is in, which only ever grows; 0 outside of all."""
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return 0 if nesting == 1 else 1 + _regions.ended


@contextlib.contextmanager
def in_autocast_region() -> Iterator[None]:
    """Let the body be one region: autocast contexts that it leaves do not drop the casts."""
    forget_casts()
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        forget_casts()
