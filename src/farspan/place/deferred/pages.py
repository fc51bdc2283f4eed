"""Memory that is reserved and not touched takes no physical memory; memory that others have left behind may."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["release_pages"]

_MADV_DONTNEED = 4


def release_pages(storage: Any) -> None:
    """Give the physical memory behind a storage, of which nobody needs what is in it, back to the system.

    An allocator hands out what was used and freed before: untouched by its new owner, and yet in this process. Where
    the system cannot be asked, it stays.
    """
    advise = _advise()
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if advise is not None and size > 0:
        advise(begin, size, _MADV_DONTNEED)


@functools.cache
def _advise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise
