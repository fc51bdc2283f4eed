"""Reserved memory for a tensor that another rank has: an address and a size, but no pages until the data are needed.

    reserve    addresses only; who reads them past all that looks after them is killed: better than zeros in a file
    fill       pages, and the owner's data in them
    empty      addresses only, again

So the state dictionary of a model of any size costs nothing on a rank that does not look into it, and one tensor at a
time on a rank that writes it to a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
from collections.abc import Callable, Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from farspan.torch_private import DisableTorchFunction, storage_at

__all__ = ["Reserved", "fill_reserved", "is_reservable", "reserve", "reserved_memory"]

_LEAST_BYTES = 256 << 10
"""Smaller tensors are fetched at once, many together: each reserved one is a question, and a kernel's mapping."""
_NONE, _READ_WRITE = 0, 3  # PROT_NONE, PROT_READ | PROT_WRITE


_Fetch = Callable[[torch.Tensor], None]
"""Brings the owner's data into memory, given as bytes, [size]."""

reserved_memory: dict[int, Reserved] = {}
"""Reserved memory by the address of the storage object: that of all ranks that are threads of this process."""


class _Kept:
    number = 64
    """Number of entries in the table when it was last searched."""


class _Filling(threading.local):
    depth = 0


_kept, _filling = _Kept(), _Filling()


class Reserved:
    """The memory of one tensor.

    Args:
        memory: What `reserve` has made of it.
        fetch: Fills it.
    """

    def __init__(self, memory: torch.Tensor, fetch: _Fetch) -> None:
        storage = memory.untyped_storage()
        self.storage = StorageWeakRef(storage)
        self.is_filled = False
        self.thread = threading.get_ident()
        self._address, self._size = storage.data_ptr(), storage.nbytes()
        self._fetch = fetch
        self._lock = threading.RLock()  # a thread of the program may write it to a file

    def fill(self) -> None:
        """Bring what the owner has now; from then on it is here."""
        with self._lock:
            set_accessible(self._address, self._size, wanted=True)
            _filling.depth += 1
            try:
                with DisableTorchFunction():  # it is no write of the program's
                    self._fetch(torch.empty(0, dtype=torch.uint8).set_(storage_at(self.storage.cdata)))
            except BaseException:
                self._empty()
                raise
            finally:
                _filling.depth -= 1
            self.is_filled = True

    @contextlib.contextmanager
    def filled(self) -> Iterator[None]:
        """Keeps the data in the memory for the body; afterwards only if they were there before."""
        with self._lock:
            was_filled = self.is_filled
            if not was_filled:
                self.fill()
            try:
                yield
            finally:
                if not was_filled:
                    self._empty()

    def _empty(self) -> None:
        self.is_filled = False
        set_accessible(self._address, self._size, wanted=False)


def is_reservable(size_bytes: int) -> bool:
    """Returns whether it is worth while to reserve memory for so many bytes, and this system can."""
    return size_bytes >= _LEAST_BYTES and os.name == "posix"


def reserve(size_bytes: int, fetch: _Fetch) -> torch.Tensor:
    """Memory without pages, as a tensor of bytes, [size_bytes]; it is given back when the last tensor in it goes."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = torch.frombuffer(mmap.mmap(-1, size_bytes, flags=flags), dtype=torch.uint8)
    reserved = Reserved(memory, fetch)
    set_accessible(memory.data_ptr(), size_bytes, wanted=False)
    if len(reserved_memory) >= 2 * _kept.number:
        _forget_released()
        _kept.number = max(len(reserved_memory), 64)
    reserved_memory[reserved.storage.cdata] = reserved
    return memory


def fill_reserved() -> None:
    """Fill all that the program of this thread still holds: what comes may touch it, or the owners' data may change."""
    if reserved_memory and not _filling.depth:  # fetching may start a thread itself
        _forget_released()
        thread = threading.get_ident()
        for reserved in list(reserved_memory.values()):
            if reserved.thread == thread and not reserved.is_filled:
                reserved.fill()


def _forget_released() -> None:
    for key, reserved in list(reserved_memory.items()):
        if reserved.storage.expired():
            reserved_memory.pop(key, None)


def set_accessible(address: int, size_bytes: int, *, wanted: bool) -> None:
    """Let reserved memory be used, or give its pages back.

    Raises:
        OSError: The system does not let it.
    """
    if not wanted:
        _call("madvise", address, size_bytes, int(mmap.MADV_DONTNEED))
    _call("mprotect", address, size_bytes, _READ_WRITE if wanted else _NONE)


def _call(name: str, address: int, size_bytes: int, what: int) -> None:
    if _function(name)(address, size_bytes, what):
        number = ctypes.get_errno()
        raise OSError(number, f"{name} of {size_bytes} bytes: {os.strerror(number)}")


@functools.cache
def _function(name: str) -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True)[name]
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
