"""Where the ops between modules run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from farspan.graph import EVERYWHERE, Value
from farspan.lazy.metadata import Entry, Unknown
from farspan.lazy.tensor import LazyTensor

if TYPE_CHECKING:
    from farspan.lazy.recorder import Recorder

__all__ = ["stage_for", "stage_of"]


def stage_of(recorder: Recorder, item: Any) -> int | None:
    """Where a recorded tensor or a parameter lives; None for what every rank has."""
    if type(item) is LazyTensor:
        return item._value.stage
    placed = recorder.placed.get(id(item))
    return None if placed is None else placed.stage


def stage_for(
    recorder: Recorder,
    entry: Entry | Unknown,
    tensors: list[torch.Tensor],
    values: Sequence[Value],
    *,
    is_new: bool = False,
) -> int:
    """Where an op runs: with what it writes into, else where the program says (`farspan.on`), else with its input.

    Args:
        recorder: Knows what the program says.
        entry: Of the op.
        tensors: All tensors among its arguments.
        values: The recorded ones.
        is_new: What it writes into is not recorded yet, and will be where the op runs.
    """
    if entry.mutated and not is_new:
        return _stage_written(recorder, entry, tensors)
    here = recorder.here
    if not here:
        return _stage_of(values)
    natural = _stage_of(values) if values else -1
    return natural if natural in here else here[0]


def _stage_of(values: Sequence[Value]) -> int:
    """An op runs where its largest lazy input is; among equals, where the latest was produced."""
    best = values[0]
    best_rank = _production_order(best)
    for value in values[1:]:
        rank = _production_order(value)
        if rank > best_rank:
            best, best_rank = value, rank
    return max(best.stage, 0)


def _production_order(value: Value) -> tuple[int, int, int, int]:
    if value.call is None:
        return (-1 if value.stage == EVERYWHERE else value.meta.numel, -1, -1, 0)
    return (value.meta.numel, value.call.graph.index, value.call.index, value.index)


def _stage_written(recorder: Recorder, entry: Entry | Unknown, tensors: list[torch.Tensor]) -> int:
    """A call that writes runs where the tensor it writes into lives."""
    written = [tensors[i] for i in entry.mutated]
    stages = {tensor._value.stage for tensor in written if type(tensor) is LazyTensor}
    stages |= {recorder.placed[id(tensor)].stage for tensor in written if id(tensor) in recorder.placed}
    if len(stages) > 1:
        recorder.refuse(
            f"{entry.name} writes into tensors of several stages",
            hint="write into them one by one, with separate calls",
        )
    return stages.pop() if stages else 0
