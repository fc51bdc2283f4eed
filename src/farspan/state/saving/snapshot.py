"""Copies of what is being saved, as it was at the call, in memory that is kept from one save to the next.

What is lent (`lent_state`) is copied a little later, in the thread that saves, before it writes.

Memory that is touched for the first time costs more than the copy: 512 MiB take 25 ms into memory that is there, and
over a second into new pages of 4 KiB (measured on a virtual machine). So it is kept, and asked for in large pages.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import psutil
import torch

from farspan.comm.tensor_bytes import buffer_of
from farspan.torch_private import DisableTorchFunction

__all__ = ["Arena", "copy_bytes", "fits", "size_of"]

_ALIGNMENT = 64
_SPARE = 2
"""So many times what is copied must be free: the program needs memory too."""


class Arena:
    """Memory for one save at a time."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    @property
    def size_bytes(self) -> int:
        return 0 if self._memory is None else len(self._memory)

    def copy(self, tensors: Mapping[str, torch.Tensor], later: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Copies of tensors of any device and layout, each in row-major order; the last ones are overwritten.

        Args:
            tensors: By name.
            later: Of which there is only the memory for a copy.
        """
        memory = self._of_size(size_of(tensors))
        found: dict[str, torch.Tensor] = {}
        begin = 0
        with torch.no_grad(), DisableTorchFunction():
            for name, tensor in tensors.items():
                if not tensor.numel():
                    found[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
                    continue
                copied = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=begin)
                found[name] = copied.view(tensor.shape)
                if name not in later:
                    found[name].copy_(tensor.detach())
                begin += _aligned(tensor.nbytes)
        return found

    def _of_size(self, size_bytes: int) -> mmap.mmap:
        if self._memory is None or len(self._memory) < size_bytes:
            self._memory = None  # the old one is free before the new one is made
            self._memory = mmap.mmap(-1, max(size_bytes, mmap.PAGESIZE))
            if hasattr(mmap, "MADV_HUGEPAGE"):
                try:
                    self._memory.madvise(mmap.MADV_HUGEPAGE)
                except OSError:  # a kernel without them
                    return self._memory
        return self._memory


def copy_bytes(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy tensors of the CPU without gaps, in any thread: each first one into the second."""
    for source, target in pairs:
        np.copyto(np.frombuffer(buffer_of(target), np.uint8), np.frombuffer(buffer_of(source), np.uint8))


def size_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Returns the bytes of a copy of them."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors.values())


def fits(arena: Arena, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Returns whether there is memory for a copy, and some for the program besides."""
    missing = size_of(tensors) - arena.size_bytes
    return missing <= 0 or psutil.virtual_memory().available > _SPARE * missing


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
