"""Sums and means over what is split: each member adds up its part, and the sums of all are added up everywhere.

weights.mean(dim=1)   [batch, heads, ..], split along heads     the sum of what members have, on each of them alike
"""

from __future__ import annotations

import math
from typing import Any

import torch

from farspan.record.team.rules.protocol import Rules
from farspan.record.team.team_tensor import TeamTensor, used

__all__ = ["RULES"]

_T: Any = torch.Tensor


def _sum(splitting: Rules, input: Any, dim: Any = None, keepdim: Any = False, *, dtype: Any = None, **more: Any) -> Any:
    return NotImplemented if more else _added(splitting, input, dim, keepdim, dtype, is_mean=False)


def _mean(
    splitting: Rules, input: Any, dim: Any = None, keepdim: Any = False, *, dtype: Any = None, **more: Any
) -> Any:
    return NotImplemented if more else _added(splitting, input, dim, keepdim, dtype, is_mean=True)


def _added(splitting: Rules, input: Any, dim: Any, keepdim: Any, dtype: Any, *, is_mean: bool) -> Any:
    """Record the sum or mean of a team's tensor; NotImplemented where it is over nothing that is split, or over all."""
    if type(input) is not TeamTensor or input._dim is None or not input.dtype.is_floating_point:
        return NotImplemented
    given = (dim,) if isinstance(dim, int) else dim
    if not isinstance(given, (tuple, list)) or type(keepdim) is not bool or not given:
        return NotImplemented
    if not all(type(each) is int and -input.dim() <= each < input.dim() for each in given):
        return NotImplemented
    dims = sorted({each % input.dim() for each in given})
    if input._dim not in dims or len(dims) == input.dim() or len(dims) < len(given):
        return NotImplemented
    number = math.prod(input.shape[each] for each in dims) if is_mean else 1
    terms = [
        splitting.record(_partial, (part, tuple(dims), keepdim, dtype, number), stage)
        for part, stage in zip(used(input)._parts, input._split.members, strict=True)
    ]
    return splitting.matrices.added_up(terms, input._split, weights=input._weights)


def _partial(
    part: torch.Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype | None, number: int
) -> torch.Tensor:
    return part.sum(dims, keepdim, dtype=dtype) / number


RULES: dict[Any, Any] = {
    **dict.fromkeys([torch.sum, _T.sum], _sum),
    **dict.fromkeys([torch.mean, _T.mean], _mean),
}
"""By function, how members of a split stage add up."""
