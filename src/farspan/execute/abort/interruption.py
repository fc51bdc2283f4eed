"""What one rank knows of the end of the step that it runs: its exception, if there is one, where it must stop, and
what must then be as it was: running statistics, other buffers.

Gradients are too large to be kept twice. Those that a backward behind the exception has added to are lost, and become
nan: the program clears them before it goes on, or sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from farspan.call.leaf import Leaf, Placed
from farspan.errors import RecordError
from farspan.execute.abort.halts import Halts
from farspan.execute.abort.order import Place, last_place, place_of_call, place_of_part
from farspan.graph import BackwardSegment, Call, Graph, Segment, Value, whole_name
from farspan.torch_private import raw_grad, set_raw_grad

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


class Undo:
    """The parameters, buffers and gradients that one rank has written in one step."""

    def __init__(self, parameters: Mapping[str, Placed]) -> None:
        self._parameters = parameters
        self._before: list[tuple[Place, Placed, torch.Tensor]] = []
        """What a buffer was before a call that writes it."""
        self._weights: list[tuple[Place, str]] = []
        """Parameters that calls between modules have written, of which nothing is kept."""
        self._gradients: list[tuple[Place, str]] = []
        """The same of gradients."""
        self._parts: list[BackwardSegment] = []

    def note_call(self, call: Call) -> None:
        """`call` is about to run."""
        target = call.target
        if type(target) is Leaf:
            for item in target.placed:
                if item.is_written and item.is_owned:
                    self._keep(call, item)
            return
        for number in call.entry.mutated:
            assert call.arguments is not None
            item = call.arguments[number]
            if type(item) is not Value:
                continue
            if item.gradient_of:
                self._gradients.append((place_of_call(call), item.gradient_of))
            elif item.name:
                placed = self._parameters[whole_name(item.name)]
                if placed.is_parameter:
                    self._weights.append((place_of_call(call), item.name))
                elif placed.is_owned:
                    self._keep(call, placed)

    def note_part(self, part: BackwardSegment) -> None:
        """A share of a backward is about to run."""
        if part.backward.requested is None and part.accumulates_into:
            self._parts.append(part)

    def check(self, end: Place, what: str) -> None:
        """Raise if a parameter has been written by what comes behind `end`.

        Args:
            end: Where the exception was raised.
            what: Which, for people.
        """
        names = sorted({name for place, name in self._weights if place > end})
        if names:
            raise RecordError(
                f"the program cannot go on after {what}.",
                why=f"{names[0]} is written to by what the program does later, and that had run already.",
                hint="farspan.flush() before parameters are written: exceptions of the model are raised there",
            )

    def undo(self, end: Place, *, failed: BackwardSegment | None, incomplete: Iterable[str] = ()) -> None:
        """Let all that was written behind `end` be what it was, or lost.

        Args:
            end: Where the exception was raised.
            failed: The share of a backward that raised it, of which some gradients may have come and others not.
            incomplete: Parameters of this rank of which gradients have been made on others that have not come.
        """
        for place, placed, before in reversed(self._before):
            if place > end:
                tensor = placed.tensor.data
                if tensor.shape == before.shape and tensor.dtype == before.dtype:
                    tensor.copy_(before)
                else:
                    placed.tensor.data = before
        lost = {name for place, name in self._gradients if place > end}
        parts = [part for part in self._parts if place_of_part(part) > end or part is failed]
        lost.update(name for part in parts for name in _names(part.accumulates_into))
        for name in sorted(lost.union(incomplete)):
            tensor = self._parameters[name].tensor
            gradient = raw_grad(tensor) if self._parameters[name].is_owned else None
            if gradient is not None:
                set_raw_grad(tensor, _nan_like(gradient))
            elif name in incomplete:
                set_raw_grad(tensor, torch.full_like(tensor, torch.nan, requires_grad=False))

    def _keep(self, call: Call, item: Placed) -> None:
        self._before.append((place_of_call(call), item, item.tensor.detach().clone()))


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
        if not self.halts.places:
            return None
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
        """A task has raised; returns when all ranks know."""
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


def _names(accumulates_into: Iterable[object]) -> list[str]:
    """Returns the parameters behind the keys of a part, which are names, and leaves."""
    found: list[str] = []
    for key in accumulates_into:
        if isinstance(key, str):
            found.append(whole_name(key))
        elif isinstance(key, Leaf):
            found += [item.name for item in key.placed if item.is_parameter]
    return found


def _nan_like(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout is torch.strided:
        return torch.full_like(gradient, torch.nan)
    return gradient * torch.nan
