"""Plain tensors that a run may write into: what they were, and whether they have been written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from farspan.torch_private import no_dispatch, set_version

__all__ = ["Kept"]


class Kept:
    """Tensors that a run may write into, although they are neither parameters, nor buffers, nor arguments."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        with no_dispatch():  # a run on fakes really sets `.data`
            self._kept = [(item, item._version, item.detach()) for item in tensors if type(item) is torch.Tensor]

    def put_back(self, *, is_real: bool) -> set[int]:
        """Returns ids of those that have been written into; after a run on fakes they have the memory that they had:
        `Watch` puts back what was in there.
        """
        written = {id(item) for item, version, memory in self._kept if _is_written(item, version, memory)}
        if not is_real:
            with no_dispatch(), torch.no_grad():
                for item, version, memory in self._kept:
                    if id(item) in written:
                        item.data = memory
                        set_version(item, version)
        return written


def _is_written(item: torch.Tensor, version: int, memory: torch.Tensor) -> bool:
    """Returns whether a tensor has been written to since it had this version and this memory."""
    return item._version != version or _memory_of(item) != _memory_of(memory)


def _memory_of(item: torch.Tensor) -> tuple[Any, ...]:
    if item.layout is not torch.strided:
        return (id(item.layout), item.shape, item.dtype)
    return (item.untyped_storage()._cdata, item.storage_offset(), item.shape, item.stride(), item.dtype)
