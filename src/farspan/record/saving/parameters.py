"""Parameters of other ranks as tensors that get their data when these are used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from farspan.record.saving.reserved import is_reservable, reserve
from farspan.torch_private import DisableTorchFunction

if TYPE_CHECKING:
    from farspan.call.leaf import Placed
    from farspan.graph import Meta
    from farspan.record.recording import Recording

__all__ = ["laid_out", "reserved_for", "reserved_tensor"]


def reserved_for(recorder: Recording, placed: Placed) -> torch.Tensor:
    """Returns a parameter of another rank, laid out as it is there, in reserved memory; a small one is fetched at
    once."""
    read: Any = recorder.engine.read_parameter
    tensor = reserved_tensor(placed.meta, functools.partial(read, placed))
    return laid_out(placed.meta, read(placed)) if tensor is None else tensor


def reserved_tensor(meta: Meta, read: Callable[[torch.Tensor | None], torch.Tensor]) -> torch.Tensor | None:
    """Returns a tensor in reserved memory; None if it is too small for that.

    Args:
        meta: Of the tensor.
        read: Its data, in the order of its shape; into memory for them, bytes, [size], if that is given.
    """
    if not is_reservable(meta.size_bytes):
        return None
    order = _order_in_memory(meta)
    sizes = [meta.shape[dim] for dim in order]
    is_moved = order != sorted(order)

    def fill(memory: torch.Tensor) -> None:
        if is_moved:
            _placed_in(memory, meta, sizes, order).copy_(read(None))
        else:
            read(memory)

    with DisableTorchFunction():  # it is no use of the program's
        return _placed_in(reserve(meta.size_bytes, fill), meta, sizes, order)


def laid_out(meta: Meta, data: torch.Tensor) -> torch.Tensor:
    """`data` with the strides of `meta`, where these leave no gaps."""
    order = _order_in_memory(meta)
    if order == sorted(order):
        return data
    sizes = [meta.shape[dim] for dim in order]
    memory = torch.empty(meta.size_bytes, dtype=torch.uint8)
    return _placed_in(memory, meta, sizes, order).copy_(data)


def _placed_in(memory: torch.Tensor, meta: Meta, sizes: list[int], order: list[int]) -> torch.Tensor:
    tensor = memory.view(meta.dtype).view(sizes)
    return tensor.permute([order.index(dim) for dim in range(len(order))])


def _order_in_memory(meta: Meta) -> list[int]:
    """Returns the dims as they follow each other in memory, the slowest first; those of the shape if there are gaps."""
    own = list(range(len(meta.shape)))
    order = sorted(own, key=lambda dim: (-meta.stride[dim], dim))
    expected = 1
    for dim in reversed(order):
        if meta.shape[dim] != 1 and meta.stride[dim] != expected:
            return own
        expected *= meta.shape[dim]
    return order if any(meta.shape[dim] != 1 for dim in order) else own
