"""Decides where one rank must stop in the step that it runs: at its own exception, if it has raised one, or at another
rank's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from farspan.call.leaf import Placed
from farspan.execute.abort.halts import Halts
from farspan.execute.abort.order import Place, last_place, place_of_call, place_of_part
from farspan.execute.abort.undo import Undo
from farspan.graph import BackwardSegment, Call, Graph, Segment

__all__ = ["Interruption", "Raised"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An exception that the user's code has raised on this rank."""

    error: Exception
    place: Place
    call: Call
    """The call that raised it, or one of those whose backward did."""
    part: BackwardSegment | None
    """The share of a backward that raised it."""
    is_in_pieces: bool
    """True if that backward adds to gradients in another order than autograd would on its own."""


class Interruption:
    """The interruption of one step, on one rank."""

    def __init__(
        self,
        halts: Halts,
        step: int,
        graphs: Sequence[Graph],
        parameters: Mapping[str, Placed],
        check: Callable[[], None],
    ) -> None:
        self.halts = halts
        self.step = step
        self.check = check
        self.undo = Undo(parameters)
        self.raised: Raised | None = None
        """The first exception in the program's order."""
        self._call: Call | None = None
        self._leaves_weights = False
        self._runs_ahead = _may_run_ahead(graphs)

    @property
    def has_ended(self) -> bool:
        """Returns whether some of the step is not to run."""
        return self.halts.place_in(self.step) is not None

    def end_before(self, work: Segment | BackwardSegment) -> Place | None:
        """Returns where the step ends, if that is before the end of a task; then all ranks know it."""
        end = self.halts.place_in(self.step)
        return None if end is None or last_place(work) < end else self._end_that_all_know()

    def begin_call(self, call: Call) -> None:
        """`call` is about to run."""
        self._call = call
        if self._runs_ahead:
            self.undo.note_call(call)

    def begin_part(self, part: BackwardSegment, *, leaves_weights: bool) -> None:
        """A share of a backward is about to run."""
        self._leaves_weights = leaves_weights
        self.undo.note_part(part)

    def note(self, error: Exception, work: Segment | BackwardSegment) -> None:
        """A task has raised; return when all ranks know."""
        if isinstance(work, BackwardSegment):
            call = work.calls[0] if work.calls else work.backward.roots[0].call
            assert call is not None
            in_pieces = self._leaves_weights or any(isinstance(edge.key, str) for edge in work.outgoing)
            raised = Raised(error=error, place=place_of_part(work), call=call, part=work, is_in_pieces=in_pieces)
        else:
            call = self._call if self._call is not None and self._call.segment is work else work.calls[0]
            raised = Raised(error=error, place=place_of_call(call), call=call, part=None, is_in_pieces=False)
        if self.raised is None or raised.place < self.raised.place:
            self.raised = raised
        self.halts.broadcast(self.step, raised.place)
        self._end_that_all_know()

    def _end_that_all_know(self) -> Place | None:
        """Returns where the step ends; it may come to end even earlier while this rank waits."""
        end, known = self.halts.place_in(self.step), None
        while end is not None and end != known:
            known = end
            self.halts.wait_known(self.step, end, self.check)
            end = self.halts.place_in(self.step)
        return end


def _may_run_ahead(graphs: Sequence[Graph]) -> bool:
    """Returns whether a call may run before one that comes before it in the program: not where each segment needs the
    one before it.
    """
    levels = [segment.level for graph in graphs for segment in graph.segments]
    return len(graphs) > 1 or len(set(levels)) < len(levels)
