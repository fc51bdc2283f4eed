"""Decides where the ops between modules run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.infer.entry import Entry, Unknown
from farspan.call.leaf import Leaf
from farspan.graph import EVERYWHERE, Value
from farspan.record.tensor import LazyTensor

if TYPE_CHECKING:
    from farspan.record.recording import Recording

__all__ = ["latest_stage", "stage_for", "stage_of"]


def stage_of(recorder: Recording, item: Any) -> int | None:
    """Returns where a recorded tensor or a parameter lives; None for what every rank has."""
    if type(item) is LazyTensor:
        return item._value.stage
    placed = recorder.placed.get(id(item))
    return None if placed is None else placed.stage


def stage_for(
    recorder: Recording,
    entry: Entry | Unknown,
    tensors: list[torch.Tensor],
    values: Sequence[Value],
    *,
    is_new: bool = False,
) -> int:
    """Returns where an op runs: with what it writes into, else where the program says (`farspan.on`), else with its
    input.

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
    if not values:  # all have been fetched
        values = [tensor._value for tensor in tensors if type(tensor) is LazyTensor]
    if not here:
        return latest_stage(values)
    natural = latest_stage(values) if values else -1
    return natural if natural in here else here[0]


def latest_stage(values: Sequence[Value]) -> int:
    """Returns the latest pipeline level's stage among an op's inputs: data go on from there, and not back and forth.

        skip on stage 0, x on stage 2     cat((skip, x)) on stage 2, however large the skip is

    Of inputs that have come as far, the largest decides, and among equals the latest. A weight that is larger than the
    data is not sent: the op runs where it lives.
    """
    stage = values[0].stage
    for value in values:
        if value.stage != stage:
            break
    else:
        return max(stage, 0)
    latest, largest = max(values, key=_how_far), max(values, key=_size)
    decides = largest if largest is not latest and _is_weight(largest) else latest
    return max(decides.stage, 0)


def _how_far(value: Value) -> tuple[int, int, int, int, int]:
    if value.call is None:
        return (-1, -1, _size(value), -1, -1)
    return (value.call.graph.index, value.call.level, _size(value), value.call.index, value.index)


def _size(value: Value) -> int:
    return -1 if value.stage == EVERYWHERE else value.meta.numel


def _is_weight(value: Value) -> bool:
    """Returns whether it is a parameter, or made of parameters alone by operations between modules.

    Values remember it: a weight that is made in many operations (a power iteration, say) has ever so many ways back to
    its parameters.
    """
    todo = [value]
    while todo:
        item = todo[-1]
        if item.is_weight is None:
            inputs = _made_of(item)
            unknown = [each for each in inputs if each.is_weight is None]
            if unknown:
                todo += unknown
                continue
            item.is_weight = bool(item.name) if item.call is None else bool(inputs) and all(x.is_weight for x in inputs)
        todo.pop()
    return bool(value.is_weight)


def _made_of(value: Value) -> list[Value]:
    """Returns what an operation between modules has made it of; nothing if that has looked it up: it is data."""
    if value.call is None or type(value.call.target) is Leaf:
        return []
    given = value.call.arguments or ()
    if any(not isinstance(item, Value) and not item.dtype.is_floating_point for item in given):
        return []
    return [item for item in given if isinstance(item, Value)]


def _stage_written(recorder: Recording, entry: Entry | Unknown, tensors: list[torch.Tensor]) -> int:
    """Returns the stage of the tensor that a call writes into: the call runs there."""
    written = [tensors[i] for i in entry.mutated]
    stages = {tensor._value.stage for tensor in written if type(tensor) is LazyTensor}
    stages |= {recorder.placed[id(tensor)].stage for tensor in written if id(tensor) in recorder.placed}
    if len(stages) > 1:
        recorder.refuse(
            f"{entry.name} writes into tensors of several stages",
            hint="write into them one by one, with separate calls",
        )
    return stages.pop() if stages else 0
