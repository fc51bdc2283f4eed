"""Functions over lists of tensors (`torch._foreach_*`) that lie on several stages: one call for each stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farspan.call.pytree.template import flatten, map_tensors
from farspan.record.ops.op_placement import stage_of
from farspan.record.ops.overrides import read_data

if TYPE_CHECKING:
    from farspan.record.recording import Recording

__all__ = ["record_foreach"]


def record_foreach(recorder: Recording, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record `function` stage by stage, and put its results together in the order of its arguments."""
    if recorder.here and not function.__name__.endswith("_"):  # the program says where; what writes stays
        template, tensors = flatten((args, kwargs))
        return recorder.record(function, template, tensors, None, given=(args, kwargs))
    number = len(args[0])
    by_stage: dict[int | None, list[int]] = {}
    for index, item in enumerate(args[0]):
        by_stage.setdefault(stage_of(recorder, item), []).append(index)
    results: list[Any] = [None] * number
    has_results = False
    for stage, indices in by_stage.items():
        own_args = tuple(_pick(item, number, indices) for item in args)
        if stage is None:  # plain tensors stay so
            part = function(*map_tensors(own_args, read_data), **kwargs)
        else:
            template, tensors = flatten((own_args, kwargs))
            part = recorder.record(function, template, tensors, stage)
        if part is not None:
            has_results = True
            for index, result in zip(indices, part, strict=True):
                results[index] = result
    return results if has_results else None


def _pick(item: Any, number: int, indices: list[int]) -> Any:
    """Returns the elements of a list argument that belong to a stage; other arguments as they are."""
    if isinstance(item, (list, tuple)) and len(item) == number:
        return [item[index] for index in indices]
    return item
