"""Finds how the rows of a batch lie in the tensors that a function is given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from farspan.record.lanes.lane_tensor import LaneTensor, lane_tensors
from farspan.record.tensor import LazyTensor

if TYPE_CHECKING:
    from farspan.record.lanes.batches import Lanes

__all__ = ["Found", "aligned", "calls_of", "lane_tensors_of", "parts_of", "rows_of"]

Found = tuple[Sequence[Callable[[], Any]], bool] | None
"""For each lane its call, and whether the results are to be added; None where the function needs the whole."""


def rows_of(item: LaneTensor) -> list[int]:
    assert item._dim is not None
    return [lane.shape[item._dim] for lane in item._lanes]


def lane_tensors_of(window: Lanes, items: Sequence[Any]) -> list[LaneTensor] | None:
    """Returns the lane tensors among arguments, if there are some and all are rows of this window."""
    found = lane_tensors(items)
    if not found or any(item._window is not window or item._dim is None for item in found):
        return None
    return found


def parts_of(item: torch.Tensor, dim: int, rows: Sequence[int]) -> list[torch.Tensor]:
    """Returns a plain tensor, cut along `dim` as the lanes are."""
    return [*torch.split(item, list(rows), dim)]


def aligned(item: Any, first: LaneTensor, rows: Sequence[int]) -> list[Any] | None:
    """Returns what each lane gets of an argument that broadcasts with `first`; None if that is not certain.

    Args:
        item: A tensor, or a plain value.
        first: A lane tensor.
        rows: How many rows its lanes have.
    """
    if not isinstance(item, torch.Tensor):
        return None if isinstance(item, (list, tuple, dict)) and lane_tensors(item) else [item] * len(rows)
    assert first._dim is not None
    from_right = first.dim() - first._dim
    if type(item) is LaneTensor:
        assert item._dim is not None
        is_like = item.dim() - item._dim == from_right and rows_of(item) == list(rows)
        return [*item._lanes] if is_like else None
    if item.dim() < from_right or item.shape[-from_right] == 1:
        return [item] * len(rows)
    if type(item) is LazyTensor or item.shape[-from_right] != sum(rows):
        return None
    return parts_of(item, item.dim() - from_right, rows)


def calls_of(
    function: Any, columns: Sequence[Sequence[Any]], named: Sequence[dict[str, Any]]
) -> list[Callable[[], Any]]:
    """Returns the calls of the lanes: `columns` has for each argument what every lane gets."""
    return [
        functools.partial(function, *[column[number] for column in columns], **kwargs)
        for number, kwargs in enumerate(named)
    ]
