"""What has run is let go, but for what the program can still read or differentiate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from farspan.graph.graph import Call, Graph, Segment

__all__ = ["let_go"]


def let_go(graphs: Sequence[Graph], released: Iterable[Call]) -> None:
    """Drop data, arguments and autograd graphs that nothing can ask for any more.

    Args:
        graphs: All that has run.
        released: Calls that a backward has gone through, and none can again; some may be of graphs that ran before.
    """
    run = {graph.index for graph in graphs}
    for call in released:
        if call.segment.graph.index not in run and call.arguments is not None:
            call.segment.num_open -= 1
            _end_if_over(call.segment)
        call.arguments = None
    for graph in graphs:
        for segment in graph.segments:
            segment.executed = True
            segment.num_open = sum(map(_can_go_back, segment.calls))
            segment.calls = []
            _end_if_over(segment)
        graph.end()


def _end_if_over(segment: Segment) -> None:
    if not segment.num_open:
        segment.inputs.clear()
        segment.leaves.clear()
        segment.entries.clear()


def _can_go_back(call: Call) -> bool:
    """Whether a backward through the call may still come; what only such a one needs is dropped."""
    is_differentiable = False
    for value in call.outputs:
        needs_gradient = value.meta.requires_grad
        is_differentiable |= needs_gradient
        if not needs_gradient or call.arguments is None:
            if not value.is_held:
                value.data = None
            elif needs_gradient and value.data is not None:
                value.data = value.data.detach()  # without the graph that has been used
    if not is_differentiable:
        call.arguments = None
    return call.arguments is not None
