"""Counting the work of a piece of a step: products, memory traffic, and what autograd keeps."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from farspan.lazy import as_packed
from farspan.lazy.torch_private import TorchDispatchMode, flops_of, tree_leaves
from farspan.lazy.watch import storage_id
from farspan.profile.step import Operation

__all__ = ["Kept", "counted", "kept"]

_GATHERS = ("embedding", "index", "index_select", "gather")
"""They read as much of their first argument as they return."""


class _Count(TorchDispatchMode):
    """Notes the operations that run; those that only make views move nothing."""

    def __init__(self, found: list[Operation]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(item.alias_info is not None and not item.alias_info.is_write for item in func._schema.returns):
            return result
        given, made = _tensors((args, kwargs)), _tensors(result)
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
    """A context in which the operations that run are appended to `found`."""
    return _Count(found)


class Kept:
    """What autograd keeps: the size of each piece of memory."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []
        """So that no id is used twice."""

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage_id(tensor) not in self.sizes:
            self.sizes[storage_id(tensor)] = storage.nbytes()
            self._alive.append(storage)


@contextmanager
def kept(apart: Collection[int]) -> Iterator[Kept]:
    """Note what autograd keeps of what runs in the body, but for the memory in `apart`."""
    found = Kept()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided and storage_id(tensor) not in apart:
            found.add(tensor)
        return tensor if tensor.grad_fn is None else tensor.detach()  # or the graph would hold itself

    with saved_tensors_hooks(pack, as_packed):
        yield found
    found._alive.clear()


def _tensors(item: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(item) if isinstance(each, torch.Tensor)]


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
