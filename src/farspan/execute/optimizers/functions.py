"""The torch functions that an optimizer's step calls: what they write into, what they need, and those over lists of
tensors (`_foreach_`, `_fused_`), of which each place of the lists is treated by itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from farspan.call.naming import PASS_THROUGH, READERS, SHOWS
from farspan.call.pytree.template import flatten, shape_of_call
from farspan.call.wire.checked import damaged
from farspan.execute.optimizers.own import make_own
from farspan.graph import Meta
from farspan.record.tensor import LazyTensor, StubParameter
from farspan.torch_private import poisoned

__all__ = [
    "ASKS",
    "COMPUTES",
    "INDEXES",
    "LIKE",
    "LISTS",
    "READS",
    "WRITES",
    "has_mask",
    "kind_of",
    "kind_of_call",
    "over_lists",
    "shape_of",
    "shape_only",
    "small_tensor",
    "writes_by_name",
]

_T: Any = torch.Tensor
_RECORDED = (LazyTensor, StubParameter)
COMPUTES, WRITES, ASKS, READS, LISTS, INDEXES, LIKE = range(1, 8)
"""Kinds of functions: the last five need no data, the data of all they are given, and each its own way."""


def _has_dynamic_shape(function: Any) -> bool:
    """Returns whether torch says of a function that the shape of its result depends on data."""
    packet: Any = getattr(torch.ops.aten, getattr(function, "__name__", ""), None)
    overloads = [getattr(packet, name) for name in packet.overloads()] if hasattr(packet, "overloads") else []
    return any(torch.Tag.dynamic_output_shape in overload.tags for overload in overloads)


def kind_of(func: Any) -> int:
    """Returns what a torch function needs: alike on every rank."""
    name = getattr(func, "__name__", "")
    if func in PASS_THROUGH and func not in SHOWS:
        kind = ASKS
    elif func in READERS or func in SHOWS or func is torch.tensor or _has_dynamic_shape(func):
        kind = READS if func is not _T.__deepcopy__ else COMPUTES
    elif name.startswith(("_foreach_", "_fused_")):
        kind = LISTS
    elif func is _T.__getitem__:
        kind = INDEXES
    elif func in (_T.view_as, _T.reshape_as, _T.expand_as, _T.type_as):
        kind = LIKE
    else:
        kind = WRITES if writes_by_name(name) else COMPUTES
    return kind


def has_mask(index: Any) -> bool:
    """Returns whether a tensor is indexed by truth values: the shape of what it gives depends on them."""
    return any(item.dtype in (torch.bool, torch.uint8) for item in flatten(index)[1])


def _written_lists(name: str) -> tuple[int, ...]:
    """Returns the positions of the lists of tensors into which the aten function `name` writes."""
    packet: Any = getattr(torch.ops.aten, name)
    arguments = getattr(packet, packet.overloads()[0])._schema.arguments
    return tuple([i for i, item in enumerate(arguments) if item.alias_info is not None and item.alias_info.is_write])


def writes_by_name(name: str) -> bool:
    """Returns whether torch's rule for names says that a function writes into its first argument."""
    if name.startswith("__"):
        return name.startswith("__i") or name in ("__setitem__", "__set__")
    return name.endswith("_")


def shape_of(part: Any) -> Any:
    """Returns a template without the values of its floating-point numbers, which metadata do not depend on."""
    if type(part) is not tuple:
        return float if type(part) is float else part
    return tuple([shape_of(item) for item in part])


def kind_of_call(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]) -> Any:
    """Returns a short substitute for `shape_of` the template of a call whose arguments are different tensors and plain
    values; None for another call. The tensors are appended to `tensors`, which is empty, in template order.
    """
    shape = shape_of_call(args, kwargs, tensors)
    if shape is None:
        return None
    count, names, parts = shape
    return count, names, tuple([float if part is not None and part[0] is float else part for part in parts])


def shape_only(meta: Meta) -> torch.Tensor:
    """Returns a tensor of the shape and dtype of another, with memory for one element."""
    return poisoned(meta.shape, meta.dtype, meta.device)


def small_tensor(meta: Meta) -> torch.Tensor:
    tensor = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
    return tensor.fill_(0.5) if meta.dtype.is_floating_point else tensor.zero_()


def sparse_sizes(blob: bytes, meta: Meta) -> list[int]:
    """Returns the shape of the values of a sparse gradient, its number of sparse dimensions, and whether it is
    coalesced."""
    sizes = json.loads(blob)
    if not isinstance(sizes, list) or len(sizes) < 3 or not all(type(size) is int and size >= 0 for size in sizes):
        raise damaged("a sparse gradient without its sizes")
    if tuple(sizes[1:-2]) != meta.shape[sizes[-2] :]:
        raise damaged("a sparse gradient of another shape than its parameter")
    return sizes


class View(Protocol):
    """The protocol of an optimizer's view of a step (`step_view`), for functions over lists."""

    me: int

    def data(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def ranks_of(self, items: Iterable[Any]) -> int: ...
    def stays_replicated(self, tensor: Any) -> bool: ...
    def stage_of(self, tensor: Any) -> int: ...
    def elsewhere(self, func: Any, args: Any, kwargs: Any) -> Any: ...
    def used(self, tensor: Any) -> Any: ...
    def becomes_known_only(self, tensor: torch.Tensor, stage: int) -> None: ...
    def with_broadcast(self, args: Any, kwargs: Any, *, but: int = 0) -> Any: ...


def over_lists(view: View, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Call `func` with the places that are here, replicated or own; of the others only metadata are known."""
    number = len(args[0])
    lists = [place for place, item in enumerate(args) if isinstance(item, (list, tuple)) and len(item) == number]
    written = [place for place in (_written_lists(name) if name.endswith("_") else ()) if place in lists]
    args, kwargs = _with_single_broadcast(view, args, kwargs, lists)
    homes = [view.ranks_of(row) for row in zip(*[args[place] for place in lists], strict=True)]
    for index, home in enumerate(homes):
        if home and any(map(view.stays_replicated, [args[place][index] for place in written])):
            homes[index] = _bring_together(view, args, lists, index, but=0)
        elif home & (home - 1):
            homes[index] = _bring_together(view, args, lists, index, but=view.ranks_of([args[lists[0]][index]]))
    for place in lists:
        for tensor in args[place]:
            view.used(tensor)
    here = [index for index, home in enumerate(homes) if home in (0, view.me)]
    results: list[Any] = [None] * number
    if here:
        here_args = [[item[i] for i in here] if place in lists else item for place, item in enumerate(args)]
        for place in lists:
            if any(type(item) is LazyTensor for item in here_args[place]):
                here_args[place] = [view.data(item) for item in here_args[place]]
        part = func(*here_args, **kwargs)
        for position, index in enumerate(here):
            results[index] = part[position] if isinstance(part, (list, tuple)) else None
            if homes[index]:
                make_own([args[place][index] for place in written])
                make_own(results[index])
    for index in [index for index, home in enumerate(homes) if home not in (0, view.me)]:
        if not written:
            row = [[item[index]] if place in lists else item for place, item in enumerate(args)]
            results[index] = view.elsewhere(func, row, kwargs)[0]
            continue
        for tensor in [args[place][index] for place in written if type(args[place][index]) not in _RECORDED]:
            row = [args[place][index] for place in lists]
            view.becomes_known_only(tensor, next(view.stage_of(item) for item in row if view.ranks_of([item])))
    if written:
        return args[0] if name.startswith("_foreach_") else None
    return results


def _bring_together(view: View, args: list[Any], lists: Sequence[int], index: int, *, but: int) -> int:
    """Let the tensors at one place of the lists be those of one rank, or replicated; returns the bit of that rank."""
    row = [args[place][index] for place in lists]
    (row,), _ = view.with_broadcast((row,), {}, but=but)
    for place, item in zip(lists, row, strict=True):
        args[place] = [*args[place][:index], item, *args[place][index + 1 :]]
    return view.ranks_of(row)


def _with_single_broadcast(view: View, args: Any, kwargs: Any, lists: Sequence[int]) -> tuple[list[Any], Any]:
    """Let tensors that are no part of a list be replicated."""
    others = [None if place in lists else item for place, item in enumerate(args)]
    if view.ranks_of(others) | view.ranks_of(kwargs.values()):
        others, kwargs = view.with_broadcast(others, kwargs)
    return [args[place] if place in lists else item for place, item in enumerate(others)], kwargs
