"""A rank's end: who is lost, and who goes on.

The launcher sees every process end, whoever it was; what a rank hears from another one's connection is only a reason to
ask. So all ranks know one order of losses and worlds, the launcher's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from farspan.errors import DeadlineError, RemoteError
from farspan.launch.membership.lines import connect_to

__all__ = ["CAUSE_S", "Membership", "ProgramsOverError", "World"]

CAUSE_S = 10.0
"""How long the launcher may take to say who is lost: it sees a process end as soon as the others do."""


class ProgramsOverError(Exception):
    """All others have ended their programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The ranks that go on.

    Attributes:
        generation: Its number; the world of the start is 0.
        ranks: As the launcher counts them, ascending.
        states: What each of them has said when it was ready.
    """

    generation: int
    ranks: Sequence[int]
    states: Sequence[Any]


class Membership:
    """One rank's connection with the launcher.

    Args:
        folder: Of the run.
        rank: Of this process, as the launcher counts.
        world: The ranks of the start.
        group: Of this rank.
        num_groups: Number of groups.
        needed_for: Why nothing can go on without this rank; "" if others have all that it has.

    Attributes:
        on_lost: Called in the listener thread with ranks that are lost, some or all of which are in the world.
        on_over: Called there if nothing goes on, with the reason.

    Raises:
        OSError: The launcher does not listen.
    """

    def __init__(
        self, folder: str, rank: int, *, world: Sequence[int], group: int, num_groups: int, needed_for: str = ""
    ) -> None:
        self.rank = rank
        self.world = World(generation=0, ranks=world, states=())
        self.on_lost: Callable[[Sequence[int]], None] = lambda ranks: None
        self.on_over: Callable[[RemoteError], None] = lambda error: None
        self.reasons: list[str] = []
        """Why ranks were lost, in order."""
        self._lost: set[int] = set()
        self._over = ""
        self._has_console = False
        self._store: list[Any] = []
        """Of which generation it is, its address and port."""
        self._coming: World | None = None
        self._condition = threading.Condition()
        self._lines = connect_to(folder)
        self._place = {"is": "member", "rank": rank, "group": group, "num_groups": num_groups}
        self.say_needed(needed_for)
        threading.Thread(target=self._listen, name=f"farspan-member-{rank}", daemon=True).start()

    def say_needed(self, needed_for: str) -> None:
        """Says why nothing can go on without this rank; "" if others have all that it has."""
        self._lines.send({**self._place, "needed_for": needed_for})

    def suspect(self, rank: int) -> None:
        """Says that the connection with a rank is lost: it is to be ended if it still runs."""
        self._lines.send({"is": "suspect", "of": rank})

    def is_broken(self) -> bool:
        """Returns whether a rank of the world is known to be lost."""
        with self._condition:
            return self._is_broken()

    def is_lost(self, rank: int) -> bool:
        """Returns whether a rank is known to be lost."""
        with self._condition:
            return rank in self._lost

    def wait_broken(self, patience_s: float) -> bool:
        """Returns whether it becomes known in time that a rank of the world is lost, and that this one goes on.

        Raises:
            RemoteError: Nothing goes on, or this rank does not.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._over or self._is_broken(), patience_s)
            self._raise_if_over()
            return self._is_broken()

    def form(self, state: Any, deadline_s: float) -> World:
        """Waits until all ranks that are left have called this, and returns who they are.

        Args:
            state: What the others get to know of this rank; JSON.
            deadline_s: The longest wait.

        Raises:
            RemoteError: Nothing goes on, or this rank does not.
            DeadlineError: Some rank has not come in time.
            ProgramsOverError: The others have ended their programs.
        """
        with self._condition:
            self._coming = None
            self._raise_if_over()
        self._lines.send({"is": "ready", "state": state})
        with self._condition:
            self._condition.wait_for(lambda: self._over or self._coming is not None, deadline_s)
            self._raise_if_over()
            if self._coming is None:
                raise DeadlineError(
                    f"rank {self.rank} waited {deadline_s:g} s for the others to go on after a loss.",
                    why=f"{'; '.join(self.reasons)}. A rank that is left has not come to the end of its step.",
                    hint="look at the ranks' logs; FARSPAN_DEADLINE=seconds allows longer waits",
                )
            self.world = self._coming
            if not self.world.ranks:
                raise ProgramsOverError
            return self.world

    def publish_store(self, address: str, port: int) -> None:
        """Says to all where the store of a new world is."""
        self._lines.send({"is": "store", "where": [self.world.generation, address, port]})

    def find_store(self, deadline_s: float) -> tuple[str, int]:
        """Returns where the store of the new world is, once its first rank has said so.

        Raises:
            RemoteError: A rank of it is lost, or nothing goes on.
            DeadlineError: It has not said so in time.
        """
        with self._condition:
            self._condition.wait_for(
                lambda: self._over or self._is_broken() or self._store[:1] == [self.world.generation], deadline_s
            )
            self._raise_if_over()
            if self._store[:1] == [self.world.generation]:
                return str(self._store[1]), int(self._store[2])
            if self._is_broken():
                raise RemoteError("a rank is lost while the others form a new world.")
            raise DeadlineError(f"rank {self.rank} waited {deadline_s:g} s for the store of the ranks that are left.")

    def take_console(self, deadline_s: float) -> None:
        """Lets what this process writes go to the console: it is the first rank now.

        Raises:
            DeadlineError: The launcher has not given it in time.
        """
        self._lines.send({"is": "first"})
        with self._condition:
            if not self._condition.wait_for(lambda: self._over or self._has_console, deadline_s):
                raise DeadlineError(
                    f"rank {self.rank} waited {deadline_s:g} s for the console.",
                    why="rank 0 is lost, and this is the first rank now; farspan run has not answered.",
                )
            self._raise_if_over()

    def _is_broken(self) -> bool:
        return not self._lost.isdisjoint(self.world.ranks)

    def _raise_if_over(self) -> None:
        if self._over:
            raise self._over_error()

    def _over_error(self) -> RemoteError:
        return RemoteError("the run cannot go on without the ranks that are lost.", why=f"{self._over}.")

    def _listen(self) -> None:
        try:
            while True:
                self._take(self._lines.receive())
        except EOFError:
            self._end("the launcher has ended")

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["is"]
        if kind == "lost":
            with self._condition:
                self._lost.update(message["ranks"])
                self.reasons.append(str(message["why"]))
                self._condition.notify_all()
            self.on_lost(message["ranks"])
        elif kind == "over":
            self._end(str(message["why"]))
        elif kind == "store":
            with self._condition:
                self._store = list(message["where"])
                self._condition.notify_all()
        elif kind == "console":
            for number, file in zip((1, 2), self._lines.files, strict=False):
                os.dup2(file, number)
                os.close(file)
            self._lines.files.clear()
            with self._condition:
                self._has_console = True
                self._condition.notify_all()
        elif kind == "world":
            world = World(generation=message["generation"], ranks=message["ranks"], states=message["states"])
            with self._condition:
                self._coming = world
                self._condition.notify_all()

    def _end(self, why: str) -> None:
        with self._condition:
            if self._over:
                return
            self._over = why
            self._condition.notify_all()
        self.on_over(self._over_error())
