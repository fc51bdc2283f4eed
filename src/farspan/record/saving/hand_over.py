"""Watches where a program may give what it holds to code that is not watched: another thread, or another process.

Memory that has only been reserved is filled before that. Torch functions are watched in the program's own thread alone.
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing.queues
import multiprocessing.reduction
import os
import queue
import sys
import threading
from typing import Any

from farspan.record.saving.reserved import fill_reserved, reserved_memory

__all__ = ["fill_before_hand_over"]

_PLACES: tuple[tuple[Any, str], ...] = (
    (threading.Thread, "start"),
    (concurrent.futures.ThreadPoolExecutor, "submit"),
    (queue.Queue, "put"),
    (multiprocessing.queues.Queue, "put"),
    (multiprocessing.reduction.ForkingPickler, "dump"),
)


def fill_before_hand_over() -> None:
    """Watch the places where threads and processes begin, or are given something."""
    for owner, name in _PLACES:
        setattr(owner, name, _filling(getattr(owner, name)))
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=fill_reserved)


def _filling(original: Any) -> Any:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if reserved_memory and not sys._getframe(1).f_globals.get("__name__", "").startswith("farspan."):
            fill_reserved()  # farspan's own threads get nothing of the program's
        return original(*args, **kwargs)

    return function
