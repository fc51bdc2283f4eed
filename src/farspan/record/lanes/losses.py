"""Losses, lane by lane: each lane's sum, divided by what the mean of the whole batch is divided by."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from farspan.call.naming import name_of
from farspan.record.lanes.batches import Batches, NotInLanesError
from farspan.record.lanes.lane_tensor import LaneTensor
from farspan.record.lanes.rows import Found, parts_of, rows_of
from farspan.record.tensor import LazyTensor

if TYPE_CHECKING:
    from farspan.record.lanes.batches import Lanes

__all__ = ["LOSSES", "divisor_of", "loss_of_lanes", "summed_inside"]

LOSSES: frozenset[Any] = frozenset(
    [
        F.cross_entropy,
        F.nll_loss,
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
    ]
)
"""Losses whose mean is their sum, divided by a number that follows from targets and shapes."""


def loss_of_lanes(window: Lanes, function: Any, args: Any, kwargs: Any) -> Found:
    """Records a loss of rows and targets: for "mean" the lanes' sums, divided by what the whole batch counts."""
    try:
        bound = _signature(function).bind(*args, **kwargs)
    except TypeError:
        return None  # torch's own error, of the whole
    bound.apply_defaults()
    given = bound.arguments
    item, target, reduction = given["input"], given["target"], given["reduction"]
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    if type(item) is not LaneTensor or item._window is not window or item._dim != 0 or item.dim() == 0:
        return None
    rows = rows_of(item)
    others = {name: each for name, each in given.items() if name not in ("input", "target", "reduction")}
    by_class = ("weight",) if function in (F.cross_entropy, F.nll_loss) else ()  # other weights may be those of rows
    if any(isinstance(each, torch.Tensor) and name not in by_class for name, each in others.items()):
        return None
    if isinstance(others.get("weight"), LazyTensor):
        return None
    is_by_class = function in (F.cross_entropy, F.nll_loss)
    if item.dim() < 2 if is_by_class else not _are_alike(item, target):
        return None
    if item.dtype in (torch.float16, torch.bfloat16):
        return None  # a sum would overflow where the mean does not
    if type(target) is LaneTensor:
        if target._window is not window or target._dim != 0 or rows_of(target) != rows:
            return None
        targets: Sequence[Any] = target._lanes
    elif (
        isinstance(target, LazyTensor)
        or not isinstance(target, torch.Tensor)
        or target.dim() == 0
        or target.shape[0] != sum(rows)
    ):
        return None
    else:
        targets = parts_of(target, 0, rows)
    if reduction not in ("mean", "sum"):
        if reduction != "none":
            return None
        return [
            functools.partial(_none, function, lane, part, others)
            for lane, part in zip(item._lanes, targets, strict=True)
        ], False
    count = 1.0
    if reduction == "mean":
        counted = _count(function, item, target, others)
        if counted is None:
            return None
        count = counted
    return [
        functools.partial(_summed, function, lane, part, others, count, is_mean=reduction == "mean")
        for lane, part in zip(item._lanes, targets, strict=True)
    ], True


def _are_alike(item: torch.Tensor, target: Any) -> bool:
    """Returns whether a loss of elements broadcasts nothing."""
    return isinstance(target, torch.Tensor) and item.shape == target.shape


def _count(function: Any, item: torch.Tensor, target: Any, others: dict[str, Any]) -> float | None:
    """Returns what the mean of a loss is divided by; None where only data say that."""
    if function not in (F.cross_entropy, F.nll_loss):
        is_divided_by_weights = function in (F.mse_loss, F.l1_loss) and others.get("weight") is not None
        return float(item.numel()) if item.shape == target.shape and not is_divided_by_weights else None
    if isinstance(target, LazyTensor):
        return None
    if target.is_floating_point():  # probabilities of classes
        return float(item.numel() // item.shape[1]) if others.get("weight") is None and item.dim() > 1 else None
    is_counted = target != others["ignore_index"]
    weight = others.get("weight")
    if weight is None:
        return float(is_counted.sum().item())
    return float(weight[target[is_counted]].sum().item())


def _summed(function: Any, lane: Any, target: Any, others: dict[str, Any], count: float, *, is_mean: bool) -> Any:
    total = function(lane, target, reduction="sum", **others)
    return total / count if is_mean else total


def _none(function: Any, lane: Any, target: Any, others: dict[str, Any]) -> Any:
    return function(lane, target, reduction="none", **others)


def summed_inside(batches: Batches, function: Any, args: Any, kwargs: Any) -> Any:
    """Call a loss inside a model that is recorded for one lane: its sum for a mean, of which the count is noted."""
    bound = _signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    counts, batches.counts = batches.counts, None
    assert counts is not None
    try:
        if given["reduction"] != "mean":
            counts.append(None)
            return function(*args, **kwargs)
        others = {name: each for name, each in given.items() if name not in ("input", "target", "reduction")}
        counted = _count(function, given["input"], given["target"], others)
        if counted is None:
            raise NotInLanesError(f"what {name_of(function)} inside the model divides by is not known")
        counts.append(counted)
        return _summed(function, given["input"], given["target"], others, 1.0, is_mean=False)
    finally:
        batches.counts = counts


def divisor_of(counts: Sequence[Sequence[float | None]]) -> float:
    """Returns what the sum of the lanes' losses is to be divided by, by what `summed_inside` has noted in each of them.

    Raises:
        NotInLanesError: They have not made one loss each, of one kind.
    """
    flat = [count for each in counts for count in each]
    if not flat:
        raise NotInLanesError("its loss is made in a module that runs as one unit")
    if any(len(each) != 1 for each in counts) or any((count is None) != (flat[0] is None) for count in flat):
        raise NotInLanesError("its lanes make other losses than the whole batch")
    return sum(count for count in flat if count is not None) if flat[0] is not None else 1.0


@functools.lru_cache(maxsize=64)
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)
