"""The launcher's end: takes what ranks say and how they end, and passes on what `Members` decides.

ranks of this host      by the door in the folder of the run
ranks of another one    by the door there, and the connection with that host's agent
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from farspan.launch.membership.door import Door
from farspan.launch.membership.members import Members, Outgoing

__all__ = ["MemberService"]


class MemberService:
    """The members of one start, and the ways to them.

    Args:
        folder: Of the run.
        num_ranks: Number of ranks.
        on_suspect: Called, in any thread, with a rank that another one has lost its connection to: it does not run on.
        give_console: Gives, to a rank that is the first one now, the numbers of files that are the console's.
    """

    def __init__(
        self,
        folder: str,
        num_ranks: int,
        on_suspect: Callable[[int], None],
        give_console: Callable[[int], AbstractContextManager[Sequence[int]]],
    ) -> None:
        self._members = Members(num_ranks)
        self._on_suspect = on_suspect
        self._give_console = give_console
        self._lock = threading.Lock()
        self._away: dict[int, Callable[[dict[str, Any]], None]] = {}
        """For ranks on other hosts, what sends them a message."""
        self._door = Door(folder, self.hear)

    @property
    def gone(self) -> set[int]:
        """Returns the ranks without which the run goes on."""
        with self._lock:
            return set(self._members.gone)

    @property
    def over(self) -> str:
        """Returns why nothing can go on; "" as long as something can."""
        with self._lock:
            return self._members.over

    def goes_on_without(self, rank: int, how: str) -> bool:
        """Takes the loss of a rank; returns whether the run goes on without it and those of its group.

        Args:
            rank: Which.
            how: What has become of it, for people.
        """
        with self._lock:
            goes_on, messages = self._members.lose(rank, how)
            self._send(messages)
        return goes_on

    def leave(self, rank: int) -> None:
        """Takes the good end of a rank."""
        with self._lock:
            self._send(self._members.leave(rank))

    def end(self, why: str) -> None:
        """The run does not go on: ranks that wait for others hear of it."""
        with self._lock:
            self._send(self._members.end(why))

    def hear_away(self, rank: int, message: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
        """Takes what a rank on another host says, and how to answer it.

        Raises:
            KeyError, TypeError, ValueError: It is no message.
        """
        with self._lock:
            self._away[rank] = answer
        self.hear(rank, message)

    def hear(self, rank: int, message: dict[str, Any]) -> None:
        """Takes what a rank says.

        Raises:
            KeyError, TypeError, ValueError: It is no message.
        """
        if message["is"] == "suspect":
            self._on_suspect(int(message["of"]))
            return
        if message["is"] == "first":
            with self._give_console(rank) as files:
                self._send_one(rank, {"is": "console"}, files)
            return
        with self._lock:
            self._send(self._members.hear(rank, message))

    def close(self) -> None:
        """Ends all connections."""
        self._door.close()

    def _send(self, messages: Sequence[Outgoing]) -> None:
        for ranks, message in messages:
            for rank in ranks:
                self._send_one(rank, message)

    def _send_one(self, rank: int, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        if not self._door.send(rank, message, files) and rank in self._away:
            self._away[rank](message)
