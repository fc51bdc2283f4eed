"""Lets the processes of this host reach the directory of services, which is with the launcher on another host.

process --Unix socket--> relay, in the agent --connection with the launcher--> directory
"""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Callable

from farspan.launch.membership.entrance import Entrance
from farspan.launch.membership.lines import Lines, Message
from farspan.launch.sweep import Sweeper
from farspan.settings import PREFIX

__all__ = ["SERVICES_VARIABLE", "Relay"]

SERVICES_VARIABLE = f"{PREFIX}SERVICES"
"""Names the folder of this host where the directory, or a relay of it, and all services of this host listen."""


class Relay:
    """Passes on what processes of this host say to the directory, and its answers.

    Args:
        pass_on: Sends a message of a process, by its number, to the directory.

    Attributes:
        folder: Where it and the services of this host listen; only this user can enter it.
    """

    def __init__(self, pass_on: Callable[[int, Message], None]) -> None:
        self._pass_on = pass_on
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._lines: dict[int, Lines] = {}
        self.folder = tempfile.mkdtemp(prefix="farspan-run-")
        self._sweeper = Sweeper(self.folder)
        self._entrance = Entrance(self.folder, self._serve, "farspan-relay")

    def send(self, process: int, message: Message) -> None:
        """Sends an answer to a process, or hangs up; one that has ended hears nothing."""
        with self._lock:
            lines = self._lines.get(process)
        if lines is not None and message.get("is") == "closed":
            lines.close()
        elif lines is not None:
            lines.send(message)

    def close(self) -> None:
        """Ends all connections, and removes the folder."""
        self._entrance.close()
        self._sweeper.close()

    def _serve(self, lines: Lines) -> None:
        with self._lock:
            number = next(self._numbers)
            self._lines[number] = lines
        try:
            while True:
                self._pass_on(number, lines.receive())
        except EOFError:
            with self._lock:
                del self._lines[number]
            self._pass_on(number, {"is": "ended"})
