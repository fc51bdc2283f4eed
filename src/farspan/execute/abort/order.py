"""Places in the program's order: of what one process would have done before something, and what after it.

micro-batch 0: calls, backward    micro-batch 1: calls, backward    ...
(0, 0, call)   (0, 1, ...)        (1, 0, call)   (1, 1, ...)
"""

from __future__ import annotations

from farspan.graph import Backward, BackwardSegment, Call, Segment

__all__ = ["Place", "last_place", "place_of_backward", "place_of_call", "place_of_part"]

Place = tuple[int, ...]
"""Compared as tuples; the same numbers on every rank."""

_FORWARD = 0


def place_of_call(call: Call) -> Place:
    return (call.graph.index, _FORWARD, call.index)


def place_of_backward(backward: Backward) -> Place:
    """Returns where a backward begins: all its segments come after it."""
    return (backward.graph.index, _FORWARD + 1 + backward.graph.backwards.index(backward))


def place_of_part(part: BackwardSegment) -> Place:
    """Returns the place of a backward segment: a backward goes through the segments from the latest to the first."""
    return (*place_of_backward(part.backward), *(-number for number in part.order))


def last_place(work: Segment | BackwardSegment) -> Place:
    """Returns the place of the last thing that a task does."""
    return place_of_call(work.calls[-1]) if isinstance(work, Segment) else place_of_part(work)
