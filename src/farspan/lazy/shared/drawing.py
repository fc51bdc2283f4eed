"""Calls that draw what they would draw in the plain program: they take their places in its random numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from farspan.graph import Call
from farspan.lazy.metadata import Entry, Unknown
from farspan.lazy.ops.answers import answer

if TYPE_CHECKING:
    from farspan.lazy.recorder import Recorder

__all__ = ["answer_drawing", "draws_in_python"]


def answer_drawing(
    recorder: Recorder, call: Call, entry: Entry, tensors: list[torch.Tensor], given: tuple[Any, ...]
) -> Any:
    """Let a call that has just been recorded take its place; if nobody knows where that ends, the call runs now.
    Where a seed was given, its path says what it draws.

    Returns:
        What the user's code gets.
    """
    graph = recorder.current
    call.path = recorder.path_of(call.target)
    if not recorder.draws.is_plain:
        graph.note_path(call.path)
        return answer(recorder, call, entry, tensors, given)
    call.draws = place = recorder.draws.place_of(entry)
    graph.note_path((*call.path, *place.start))
    result = answer(recorder, call, entry, tensors, given)
    if place.end is None:
        reason = f"how many random numbers {entry.name} draws depends on data"
        recorder.engine.flush(reason, learning=(call, lambda: None))
    return result


def draws_in_python(entry: Entry | Unknown) -> Unknown:
    """What is known of a call that draws from Python's or numpy's generator, and may decide by it what to do."""
    if isinstance(entry, Unknown):
        return entry
    return Unknown(entry.name, "it draws from Python's or numpy's generator", is_dynamic=True)
