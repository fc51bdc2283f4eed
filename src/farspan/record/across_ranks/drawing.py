"""Calls that draw what they would draw in the plain program: they take their places in its random numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from farspan.call.draws.frame import key_of_function
from farspan.call.infer.entry import Entry, Unknown
from farspan.call.leaf import Leaf
from farspan.call.naming import find_where
from farspan.graph import Call
from farspan.record.ops.results import answer

if TYPE_CHECKING:
    from farspan.call.leaf import Target
    from farspan.record.recording import Recording

__all__ = ["NotedDraws", "answer_drawing", "draws_in_python", "path_of"]


def answer_drawing(
    recorder: Recording, call: Call, entry: Entry, tensors: list[torch.Tensor], given: tuple[Any, ...]
) -> Any:
    """Let a call that has just been recorded take its place; if nobody knows where that ends, the call runs now.
    Where a seed was given, its path says what it draws.

    Returns:
        What the user's code gets.
    """
    graph = recorder.current
    repeated = recorder.draws.repeated
    if repeated is not None:
        call.path, call.draws = repeated.path, repeated.draws
        graph.note_path((repeated.graph.index, repeated.index))
        return answer(recorder, call, entry, tensors, given)
    call.path = path_of(recorder, call.target)
    if not recorder.draws.is_plain:
        graph.note_path(call.path)
        return answer(recorder, call, entry, tensors, given)
    call.draws = place = recorder.draws.place_of(entry.draws)
    if recorder.frame is recorder.root and entry.mutated:  # as `torch.nn.init` does
        is_weight = any(id(tensors[number]) in recorder.placed for number in entry.mutated)
        has_gradient = call.modes[0] and any(meta.requires_grad for meta in entry.metas)
        place.is_same_in_groups = is_weight or not has_gradient
    graph.note_path((*call.path, *place.start))
    result = answer(recorder, call, entry, tensors, given)
    if place.end is None:
        reason = f"how many random numbers {entry.name} draws depends on data"
        recorder.engine.flush(reason, resolving=(call, lambda: None))
    return result


def path_of(recorder: Recording, target: Target) -> tuple[int, int, int]:
    """Returns the path that the draws of the call being recorded depend on where a seed was given."""
    key = target.key if type(target) is Leaf else key_of_function(target)
    number = recorder.number if recorder.number >= 0 else recorder.frame.count(key)  # only now known to draw
    return (recorder.frame.key, key, number)


def draws_in_python(entry: Entry | Unknown) -> Unknown:
    """Returns what is known of a call that draws from Python's or numpy's generator, and may decide by it what to
    do."""
    if isinstance(entry, Unknown):
        return entry
    return Unknown(entry.name, is_dynamic=True)


class NotedDraws:
    """The program's own draws with torch's generator between two flushes: all ranks draw the same."""

    def __init__(self, recorder: Recording) -> None:
        self.recorder = recorder
        self._draws: list[tuple[Any, Any, tuple[int, int]]] = []
        """(function, line, before which call of which graph)"""

    def note(self, function: Any) -> None:
        """`function` draws, outside every module."""
        if len(self._draws) < _MAX_DRAWS:
            self._draws.append((function, find_where(), self.recorder.position))

    def take(self) -> list[tuple[Any, Any, tuple[int, int]]]:
        """Returns all draws since the last call."""
        draws, self._draws = self._draws, []
        return draws


_MAX_DRAWS = 1000
