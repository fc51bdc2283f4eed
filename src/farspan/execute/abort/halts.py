"""Lets all ranks know at which place of the program's order a step ends, before the first empty message is sent.

    raising rank     halt at P  ------>  all others       they run nothing behind P any more, and answer
                     (all have answered)
                     known P    ------>  all others       now they may send empty messages for what comes behind P

An empty message can so never be taken for a real one: whoever receives it has heard before that what needs it must not
run. Several ranks may raise; the first place in the program's order counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from farspan.control.channel import SideChannel
from farspan.errors import DeadlineError
from farspan.execute.abort.order import Place

__all__ = ["Halts"]


class Halts:
    """The places at which steps end, as far as this rank knows them."""

    def __init__(self, side: SideChannel, deadline_s: float) -> None:
        self.side = side
        self.deadline_s = deadline_s
        self._condition = threading.Condition()
        self.places: dict[int, Place] = {}
        """For each step a place behind which nothing runs on this rank."""
        self._known: dict[int, Place] = {}
        """For each step a place behind which nothing runs on any rank."""

    def join(self, side: SideChannel) -> None:
        """Goes on in another world."""
        self.side = side
        self.places.clear()
        self._known.clear()

    def place_in(self, step: int) -> Place | None:
        """Returns where `step` ends, as far as this rank knows; None if it goes on to its end."""
        return self.places.get(step)

    def broadcast(self, step: int, place: Place) -> None:
        """Broadcasts the place of an exception here; returns when all ranks know that nothing behind `place` is to
        run."""
        if not self._note(self.places, step, place):
            return  # one before it is on its way to all
        others = [rank for rank in range(self.side.world_size) if rank != self.side.rank]
        for what in ("halt", "known"):
            for rank in others:
                self.side.request(rank, {what: [step, *place]}, self.deadline_s)
        self._note(self._known, step, place)

    def wait_known(self, step: int, place: Place, check: Callable[[], None]) -> None:
        """Return when all ranks know that nothing behind `place` is to run.

        Args:
            step: Of all ranks.
            place: In the program's order.
            check: Raises if a rank has failed.
        """

        def is_known() -> bool:
            check()
            return step in self._known and self._known[step] <= place

        with self._condition:
            if self._condition.wait_for(is_known, self.deadline_s):
                return
        raise DeadlineError(
            f"rank {self.side.rank} waited {self.deadline_s:g} s for all ranks to hear of an exception.",
            why="the rank that raised it reports to all of them; it is stopped, very slow, or cannot be reached.",
            hint="look at the ranks' logs; FARSPAN_DEADLINE=seconds allows longer waits",
        )

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Handles what another rank broadcasts; called in a worker thread."""
        for what, table in (("halt", self.places), ("known", self._known)):
            if what in request:
                step, *place = request[what]
                self._note(table, step, tuple(place))
        return {}

    def wake(self) -> None:
        """A rank has failed: whoever waits is to look."""
        with self._condition:
            self._condition.notify_all()

    def end(self, step: int) -> None:
        """Forgets `step`, which all ranks have ended."""
        self.places.pop(step, None)
        self._known.pop(step, None)

    def _note(self, table: dict[int, Place], step: int, place: Place) -> bool:
        """Notes a place; returns whether it is the first one in the program's order so far."""
        with self._condition:
            is_first = step not in table or place < table[step]
            if is_first:
                table[step] = place
                self._condition.notify_all()
            return is_first
