"""Where the ranks of one host connect: in the folder of the run, which only this user can enter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from farspan.launch.membership.entrance import Entrance
from farspan.launch.membership.lines import Lines

__all__ = ["Door"]


class Door:
    """The connections with the ranks of this host.

    Args:
        folder: Of the run.
        hear: Called with each rank and each of its messages, in a thread for each rank.
    """

    def __init__(self, folder: str, hear: Callable[[int, dict[str, Any]], None]) -> None:
        self._hear = hear
        self._lock = threading.Lock()
        self._lines: dict[int, Lines] = {}
        self._entrance = Entrance(folder, self._serve, "farspan-members")

    def send(self, rank: int, message: dict[str, Any], files: Sequence[int] = ()) -> bool:
        """Sends a message to a rank, with numbers of open files; returns whether it has connected here."""
        with self._lock:
            lines = self._lines.get(rank)
        if lines is not None:
            lines.send(message, files)
        return lines is not None

    def close(self) -> None:
        """Ends all connections."""
        self._entrance.close()

    def _serve(self, lines: Lines) -> None:
        try:
            message = lines.receive()
            rank = int(message["rank"])
            with self._lock:
                self._lines[rank] = lines
            while True:
                self._hear(rank, message)
                message = lines.receive()
        except (EOFError, KeyError, TypeError, ValueError):  # how a rank ends is said by its process
            return
