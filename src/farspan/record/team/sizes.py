"""Sizes in the arguments of an operation, as a member of a split stage gives them for its part.

    x [2, 7, 64], split along 2     x.view(2, 7, 8, -1)   ->   part [2, 7, 32]   part.view(2, 7, 4, 8)

Whether that is the part of what the operation gives is compared by numbers elsewhere (`apart`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["TAKES_SIZES", "sizes_of_part"]

_T: Any = torch.Tensor
_Sizes = Callable[[Sequence[int], int, int, Sequence[int]], "list[int] | None"]


def sizes_of_part(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: Sequence[int], dim: int, num_parts: int
) -> tuple[Any, ...] | None:
    """Returns the arguments with the sizes for a part, behind the tensor itself; None where there are none.

    Args:
        function: One of `TAKES_SIZES`.
        args: As the program gives them.
        kwargs: By name.
        shape: Of the whole tensor.
        dim: Along which it is split.
        num_parts: Into how many.
    """
    if kwargs:
        return None
    given = list(args[1:])
    if function in _UNFLATTEN:
        if len(given) != 2:
            return None
        at = given[0] % len(shape)
        whole = [*shape[:at], *_without_unknown(given[1], shape[at]), *shape[at + 1 :]]
        sizes = _reshaped(shape, dim, num_parts, whole)
        return None if sizes is None else (at, sizes[at : at + len(given[1])])
    listed = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    if not listed or not all(isinstance(size, int) for size in listed):
        return None
    sizes = TAKES_SIZES[function](shape, dim, num_parts, listed)
    return None if sizes is None else (sizes,)


def _reshaped(shape: Sequence[int], dim: int, num_parts: int, sizes: Sequence[int]) -> list[int] | None:
    sizes = _without_unknown(sizes, math.prod(shape))
    before = math.prod(shape[:dim])
    for number, size in enumerate(sizes):
        if math.prod(sizes[:number]) == before and size % num_parts == 0:
            return [*sizes[:number], size // num_parts, *sizes[number + 1 :]]
    return None


def _expanded(shape: Sequence[int], dim: int, num_parts: int, sizes: Sequence[int]) -> list[int] | None:
    found, number = list(sizes), dim + len(sizes) - len(shape)
    if found[number] not in (-1, shape[dim]):
        return None
    found[number] = shape[dim] // num_parts
    return found


def _without_unknown(sizes: Sequence[int], numel: int) -> list[int]:
    known = -math.prod(sizes)
    return [numel // known if size == -1 and known else size for size in sizes]


_UNFLATTEN = frozenset([_T.unflatten, torch.unflatten])
TAKES_SIZES: dict[Any, _Sizes] = {
    **dict.fromkeys([_T.view, _T.reshape, torch.reshape, *_UNFLATTEN], _reshaped),
    **dict.fromkeys([_T.expand, torch.broadcast_to, _T.broadcast_to], _expanded),
}
"""Operations whose sizes depend on how their first argument is split."""
