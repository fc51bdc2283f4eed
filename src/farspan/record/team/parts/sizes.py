"""Sizes in the arguments of an operation, as a member of a split stage gives them for its part.

    x [2, 7, 64], split along 2                  x.view(2, 7, 8, -1)      part [2, 7, 32]   part.view(2, 7, 4, 8)
    x [2, 7, 96], in three sections (q, k, v)    x.view(2, 7, 3, 4, 8)    part [2, 7, 48]   part.view(2, 7, 3, 2, 8)
    x [2, 8, 7, 4], split along 1 (heads)        x.view(16, 7, 4)         part [2, 4, 7, 4] part.view(8, 7, 4)

Whether that is the part of what the operation gives is compared by numbers elsewhere (`apart`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from farspan.call.pytree.template import flatten_arguments
from farspan.record.team.parts.shares import extent_of

if TYPE_CHECKING:
    from farspan.graph import Template

__all__ = ["CHUNKS", "PICKS", "SPLITS", "TAKES_SIZES", "sections_asked_for", "sizes_of_part", "templates_of_parts"]

_T: Any = torch.Tensor
_Sizes = Callable[[Sequence[int], int, int, int, Sequence[int], int], "list[int] | None"]


def sizes_of_part(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shape: Sequence[int],
    dim: int,
    num_parts: int,
    sections: int = 1,
    member: int = 0,
) -> tuple[Any, ...] | None:
    """Returns the arguments with the sizes for a part, behind the tensor itself; None where there are none.

    Args:
        function: One of `TAKES_SIZES`.
        args: As the program gives them.
        kwargs: By name.
        shape: Of the whole tensor.
        dim: Along which it is split.
        num_parts: Into how many.
        sections: Into how many the whole falls along `dim`, each of which is split.
        member: Whose part it is.
    """
    if function in SPLITS:
        sizes, at = _split_given(args, kwargs, shape)
        if at != dim or any(size % num_parts for size in sizes):
            return None
        return tuple([size // num_parts for size in sizes]), dim
    if kwargs:
        return None
    given = list(args[1:])
    if function in _UNFLATTEN:
        if len(given) != 2:
            return None
        at = given[0] % len(shape)
        whole = [*shape[:at], *_without_unknown(given[1], shape[at]), *shape[at + 1 :]]
        sizes = _reshaped(shape, dim, num_parts, member, whole, sections)
        return None if sizes is None else (at, tuple(sizes[at : at + len(given[1])]))
    listed = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    if not listed or not all(isinstance(size, int) for size in listed):
        return None
    sizes = TAKES_SIZES[function](shape, dim, num_parts, member, listed, sections)
    return None if sizes is None else (tuple(sizes),)


def templates_of_parts(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    template: Template,
    shape: Sequence[int],
    dim: int | None,
    num_parts: int,
    sections: int,
) -> list[Template]:
    """Returns for each part the arguments with its sizes; nothing where there are none.

    Args:
        function: Whichever.
        args: As the program gives them.
        kwargs: By name.
        template: Of both.
        shape: Of the first tensor, as a whole.
        dim: Along which it is split; None if it is not.
        num_parts: Into how many.
        sections: See `sizes_of_part`.
    """
    if function not in TAKES_SIZES or dim is None:
        return [template] * num_parts
    is_even = not shape[dim] % num_parts
    found: list[Template] = []
    for member in range(1 if is_even else num_parts):
        sizes = sizes_of_part(function, args, kwargs, shape, dim, num_parts, sections, member)
        if sizes is None:
            return []
        found.append(flatten_arguments((args[0], *sizes), {})[0])
    return found * num_parts if is_even else found


def sections_asked_for(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: Sequence[int], dim: int
) -> int:
    """Returns into how many equal sections an operation lets a tensor fall along `dim`; 1 if that is not plain."""
    if function in PICKS:
        return shape[dim] if _picked(function, args, kwargs, len(shape)) == dim else 1
    if function in CHUNKS:
        given = dict(zip(("chunks", "dim"), args[1:], strict=False)) | kwargs
        return given["chunks"] if given.get("dim", 0) % len(shape) == dim else 1
    if function in _HALVES:
        return 2 if (args[1] if len(args) > 1 else kwargs.get("dim", -1)) % len(shape) == dim else 1
    if function in SPLITS:
        sizes, at = _split_given(args, kwargs, shape)
        return len(sizes) if at == dim and len(set(sizes)) == 1 else 1
    if function not in TAKES_SIZES or kwargs:
        return 1
    listed = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    if function in _UNFLATTEN and len(args) == 3:
        _, where, into = args
        at = where % len(shape)
        listed = [*shape[:at], *_without_unknown(into, shape[at]), *shape[at + 1 :]]
    if TAKES_SIZES[function] is not _reshaped or not all(isinstance(size, int) for size in listed):
        return 1
    sizes, before = _without_unknown(listed, math.prod(shape)), math.prod(shape[:dim])
    found = [size for number, size in enumerate(sizes) if size > 1 and math.prod(sizes[:number]) == before]
    return found[0] if found else 1


def _picked(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], num_dims: int) -> int:
    """Returns the dimension of which an operation picks single places; -1 if that is not plain."""
    if function not in _INDEXING:
        at = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return at % num_dims if type(at) is int else -1
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not all(type(item) in (int, slice, type(Ellipsis)) for item in index) or index.count(Ellipsis) > 1:
        return -1
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (num_dims - len(index) + 1), *index[at + 1 :])
    picked = [number for number, item in enumerate(index) if type(item) is int]
    return picked[0] if len(picked) == 1 else -1


def _split_given(args: tuple[Any, ...], kwargs: dict[str, Any], shape: Sequence[int]) -> tuple[list[int], int]:
    """Returns the sizes that `x.split` gives, and along which dimension."""
    given = dict(zip(("sizes", "dim"), args[1:], strict=False)) | kwargs
    sizes, dim = given.get("sizes", given.get("split_size", given.get("split_size_or_sections"))), given.get("dim", 0)
    dim %= len(shape)
    if isinstance(sizes, int):
        sizes = [sizes] * (shape[dim] // sizes) + [shape[dim] % sizes] * (shape[dim] % sizes > 0)
    return list(sizes or ()), dim


def _reshaped(
    shape: Sequence[int], dim: int, num_parts: int, member: int, sizes: Sequence[int], sections: int
) -> list[int] | None:
    sizes = _without_unknown(sizes, math.prod(shape))
    before, own = math.prod(shape[:dim]), shape[dim]
    if own % num_parts:  # parts of different lengths, which fall into nothing
        for number, size in enumerate(sizes):
            if math.prod(sizes[:number]) == before and size == own:
                return [*sizes[:number], extent_of(own, member, num_parts)[1], *sizes[number + 1 :]]
        return None
    for within, multiple in {(before, sections * num_parts): None, (before * sections, num_parts): None}:
        for number, size in enumerate(sizes):
            if math.prod(sizes[:number]) == within and size % multiple == 0:
                return [*sizes[:number], size // num_parts, *sizes[number + 1 :]]
    for number, size in enumerate(sizes):  # what is before it becomes one dimension with it (batch and heads)
        within = math.prod(sizes[:number])
        if within < before and before % within == 0 and size % (before // within * sections * num_parts) == 0:
            return [*sizes[:number], size // num_parts, *sizes[number + 1 :]]
    return None


def _expanded(
    shape: Sequence[int], dim: int, num_parts: int, member: int, sizes: Sequence[int], sections: int
) -> list[int] | None:
    found, number = list(sizes), dim + len(sizes) - len(shape)
    if found[number] not in (-1, shape[dim]):
        return None
    found[number] = extent_of(shape[dim], member, num_parts)[1]
    return found


def _without_unknown(sizes: Sequence[int], numel: int) -> list[int]:
    known = -math.prod(sizes)
    return [numel // known if size == -1 and known else size for size in sizes]


_HALVES = frozenset([F.glu])  # of which one is multiplied by a function of the other
_INDEXING = frozenset([_T.__getitem__])
PICKS = frozenset([*_INDEXING, torch.unbind, _T.unbind, torch.select, _T.select])
CHUNKS = frozenset([torch.chunk, _T.chunk])
SPLITS = frozenset([torch.split, _T.split])
_UNFLATTEN = frozenset([_T.unflatten, torch.unflatten])
TAKES_SIZES: dict[Any, _Sizes] = {
    **dict.fromkeys([_T.view, _T.reshape, torch.reshape, *_UNFLATTEN], _reshaped),
    **dict.fromkeys([_T.expand, torch.broadcast_to, _T.broadcast_to], _expanded),
    **dict.fromkeys(SPLITS, _expanded),  # which are told apart before
}
"""Operations whose sizes depend on how their first argument is split."""
