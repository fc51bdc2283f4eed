"""Releases what has run, but for what the program can still read or differentiate.

Calls, values, segments and graphs know each other. The ways from the whole to its parts are cut here, so that what is
over ends with the last tensor that the program holds of it, without waiting for Python's cycle collector: that looks
at what has lived for a while only when there is a quarter more of it, which a training loop takes for a leak.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from farspan.graph.backward import BackwardSegment
from farspan.graph.call import Call, Segment, Value
from farspan.graph.graph import Graph

__all__ = ["release"]


class _Living(Sequence[Any]):
    """The outputs of a call through which a backward may still come; None for those that nothing refers to any more."""

    def __init__(self, values: Iterable[Value]) -> None:
        self._references: list[Any] = [weakref.ref(value) for value in values]

    def __len__(self) -> int:
        return len(self._references)

    def __getitem__(self, index: Any) -> Any:
        return self._references[index]()


def release(graphs: Sequence[Graph], released: Iterable[Call], parts: Iterable[BackwardSegment]) -> None:
    """Drops data, arguments and autograd graphs that nothing can ask for any more.

    Args:
        graphs: All that has run.
        released: Calls that a backward has gone through, and none can again; some may be of graphs that ran before.
        parts: Of the backwards that have run.
    """
    run = {graph.index for graph in graphs}
    for call in released:
        if call.segment.graph.index not in run and call.arguments is not None:
            call.segment.num_open -= 1
            _end_if_over(call.segment)
        _end(call)
    for graph in graphs:
        for segment in graph.segments:
            segment.executed = True
            segment.num_open = sum(map(_can_go_back, segment.calls))
            segment.calls = []
            segment.outputs.clear()
            _end_if_over(segment)
        graph.end()
    for part in parts:
        if part.backward.stops is None:  # others may have to go on
            part.incoming, part.outgoing, part.calls = [], [], []


def _end_if_over(segment: Segment) -> None:
    if not segment.num_open:
        segment.inputs.clear()
        segment.leaves.clear()
        segment.entries.clear()


def _can_go_back(call: Call) -> bool:
    """Returns whether a backward through the call may still come; what only such a one needs is dropped."""
    is_differentiable = False
    for value in call.outputs:
        needs_gradient = value.meta.requires_grad
        is_differentiable |= needs_gradient
        if not needs_gradient or call.arguments is None:
            if not value.is_held:
                value.data = None
            elif needs_gradient and value.data is not None:
                value.data = value.data.detach()  # without the graph that has been used
    if not is_differentiable or call.arguments is None:
        _end(call)
        return False
    call.outputs = _Living(call.outputs)
    return True


def _end(call: Call) -> None:
    """Drops what a backward through the call would need: none comes any more."""
    call.arguments = None
    call.outputs = ()
