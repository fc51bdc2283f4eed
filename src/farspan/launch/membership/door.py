"""Where the ranks of one host connect: in the folder of the run, which only this user can enter."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from farspan.launch.membership.lines import Lines, listen_in

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
        self._listener = listen_in(folder)
        threading.Thread(target=self._accept, name="farspan-members", daemon=True).start()

    def send(self, rank: int, message: dict[str, Any], files: Sequence[int] = ()) -> bool:
        """Sends a message to a rank, with numbers of open files; returns whether it has connected here."""
        with self._lock:
            lines = self._lines.get(rank)
        if lines is not None:
            lines.send(message, files)
        return lines is not None

    def close(self) -> None:
        """Ends all connections."""
        with contextlib.suppress(OSError):  # not every system wakes who accepts by that; its thread is a daemon
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for lines in self._lines.values():
                lines.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(Lines(sock),), daemon=True).start()

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
