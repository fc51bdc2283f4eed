"""Counts the work of a part of a step: products, memory traffic, and what autograd keeps."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from farspan.call.infer.watch import storage_id
from farspan.graph import Segment
from farspan.profile.step import Operation
from farspan.torch_private import TorchDispatchMode, flops_of, saved_by, tensors_in

__all__ = ["counted", "kept"]

_GATHERS = ("embedding", "index", "index_select", "gather")
"""Operations that read as much of their first argument as they return."""


class _Count(TorchDispatchMode):
    """Notes the operations that run; those that only make views move nothing."""

    def __init__(self, found: list[Operation]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(item.alias_info is not None and not item.alias_info.is_write for item in func._schema.returns):
            return result
        given, made = tensors_in((args, kwargs)), tensors_in(result)
        if not made or "empty" in func.__name__ or "_unsafe_view" in func.__name__:
            return result
        moved = sum(map(_size, made)) * 2 if func.__name__.split(".")[0] in _GATHERS else sum(map(_size, given + made))
        numbers = next((item for item in given + made if item.is_floating_point()), made[0])
        flops = flops_of(func, args, kwargs or {}, result)
        self.found.append(
            Operation(flops=float(flops), moved_bytes=float(moved), dtype=str(numbers.dtype).removeprefix("torch."))
        )
        return result


def counted(found: list[Operation]) -> _Count:
    """Returns a context in which the operations that run are appended to `found`."""
    return _Count(found)


def kept(segment: Segment, apart: Collection[int]) -> dict[int, int]:
    """Returns the bytes of each piece of memory, by id, that autograd keeps for the backward of a segment that has run,
    but for the memory in `apart`. (Hooks would say it too, but torch.func refuses to run under them.)
    """
    values = [value for call in segment.calls for value in call.outputs]
    made = [value.data for value in values if value.data is not None]
    saved = [item for item in saved_by(made)[0] if item.layout is torch.strided]
    return {key: item.untyped_storage().nbytes() for item in saved if (key := storage_id(item)) not in apart}


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
