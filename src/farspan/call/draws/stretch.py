"""A stretch of the plain program's random numbers: what recorded calls draw, one after the other, from one state on.

    state     call            call            call               the program draws itself, or seeds: a new stretch
      |---8,192---|---8,192---|-----256-----|
    (0, 0)     (8192, 0)   (16384, 0)   (16640, 0)               points: draws so far, operations to be repeated so far

Every rank knows all points, and computes the states that it needs: of those calls that it runs, and at the end.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter
from typing import TYPE_CHECKING

import torch

from farspan.call.draws.mersenne import advanced, cached_normals
from farspan.call.draws.movement import Moves, Operation, repeated

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Sequence

    from farspan.graph import Call

__all__ = ["Place", "Point", "Stretch"]

Point = tuple[int, int]
if TYPE_CHECKING:
    Running = Callable[[Call, Sequence[torch.Tensor]], contextlib.AbstractContextManager[None]]


class Place:
    """The place in a stretch at which a call draws."""

    __slots__ = ("end", "has_moved", "is_same_in_groups", "moves", "start", "state", "stretch")

    def __init__(self, stretch: Stretch, start: Point, moves: Moves | None, end: Point | None) -> None:
        self.stretch = stretch
        self.start = start
        self.moves = moves
        self.end = end
        """The position after its draws; None where only a run can tell."""
        self.state: torch.Tensor | None = None
        """The generator's state after a call whose end only a run could tell; at the owner, once it has run."""
        self.has_moved = False
        """True if it has moved that generator, or Python's or numpy's."""
        self.is_same_in_groups = False
        """True if it is the program itself that draws, and not the model."""


class Stretch:
    """Random numbers from `state` on; `running(call, tensors)` is the context in which a call runs."""

    __slots__ = ("_known", "_repeats", "cached", "end", "running", "state")

    def __init__(self, state: torch.Tensor, running: Running) -> None:
        self.state = state
        self.running = running
        self.end: Point = (0, 0)
        self.cached = cached_normals(state)
        """The normal numbers that the state at the end keeps."""
        self._repeats: list[tuple[int, Operation, int]] = []
        self._known: list[tuple[Point, torch.Tensor]] = [((0, 0), state)]

    def append(self, moves: Moves) -> tuple[Point, Point]:
        """Adds a call that draws next; returns where it begins and ends."""
        start = self.end
        offset = start[0]
        for before, operation, after in moves.repeats:
            self._repeats.append((offset + before, operation, offset + after))
        self.cached = moves.cached
        self.end = (offset + moves.count, len(self._repeats))
        return start, self.end

    def state_at(self, point: Point) -> torch.Tensor:
        """Returns the generator's state there, from the nearest one before it that is known."""
        (offset, number), state = self._known[bisect_right(self._known, point, key=itemgetter(0)) - 1]
        for before, operation, after in self._repeats[number : point[1]]:
            state = repeated(operation, advanced(state, before - offset))
            offset = after
        return advanced(state, point[0] - offset)

    def remember(self, point: Point, state: torch.Tensor) -> None:
        """`state` is the one there."""
        at = bisect_right(self._known, point, key=itemgetter(0))
        if self._known[at - 1][0] != point:
            self._known.insert(at, (point, state))

    def forget(self) -> None:
        """Forgets all places: what was recorded has run."""
        del self._known[1:]
