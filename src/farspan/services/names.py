"""Which service is where: this process's connection with the directory of the run, or of itself where there is none."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import threading
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from farspan import settings
from farspan.control.wire import close_in_children
from farspan.errors import DeadlineError, LaunchError, ServiceError
from farspan.launch.membership.lines import Lines, socket_to
from farspan.launch.rank.process_end import at_process_end
from farspan.launch.roles.directory import Directory
from farspan.launch.roles.role import describe_process
from farspan.launch.sweep import Sweeper

__all__ = ["Names", "Place", "has_other_hosts", "names_of_run"]

_ANSWER_S = 10.0
"""How long the launcher may take to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a service is.

    Attributes:
        socket: Its name in the folder of the services of its host; no other service of the run has it.
        address: Of its host; "" for this one.
        port: Where it listens for other hosts.
        who: Has exposed it.
    """

    socket: str
    address: str
    port: int
    who: str


class Names:
    """One process's end of the directory.

    Args:
        folder: Where it and all services listen.
        is_alone: Whether this process is all of the run, so that nobody else will expose anything.
    """

    def __init__(self, folder: str, *, is_alone: bool = False) -> None:
        self.folder = folder
        self._is_alone = is_alone
        self._condition = threading.Condition()
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[str, Any] | None] = {}
        """To the questions that somebody waits for; None where it has not come."""
        self._is_over = False
        try:
            self._lines = Lines(close_in_children(socket_to(folder)))
        except OSError as error:
            raise LaunchError(
                "the launcher of this run does not answer.",
                why=f"FARSPAN_SERVICES={folder}: {error.strerror or error}.",
                hint="farspan run --role NAME=N ... starts the processes that call each other",
            ) from None
        threading.Thread(target=self._listen, name="farspan-names", daemon=True).start()

    def expose(self, name: str, socket: str, port: int = 0) -> None:
        """Says that a service is at a socket.

        Args:
            name: Of the service.
            socket: Its name in the folder.
            port: Where other hosts reach it; 0 where all of the run is on this one.

        Raises:
            ServiceError: Another process has the name.
        """
        question = {"is": "expose", "name": name, "socket": socket, "port": port, "who": describe_process()}
        answer = self._answered(question, f"say that {name!r} is exposed")
        found, who = str(answer["socket"]), str(answer["who"])
        if found != socket:
            raise ServiceError(
                f"the service {name!r} is there already.",
                why=f"{who} has exposed it; this is {describe_process()}.",
                hint="a name of its own for each, such as the rank's; or let one rank expose it (farspan.rank() == 0)",
            )

    def withdraw(self, name: str) -> None:
        """Says that a service is over."""
        self._lines.send({"is": "withdraw", "name": name})

    def find(self, name: str, timeout_s: float, but: str = "") -> Place:
        """Waits until a service is there; returns where.

        Args:
            name: Of the service.
            timeout_s: The longest wait.
            but: A socket that does not count: nobody listens there.

        Raises:
            DeadlineError: Nobody has exposed it in time.
        """
        with self._condition, self._asked({"is": "find", "name": name, "but": but}) as number:
            if not self._is_alone:
                self._wait(number, timeout_s)
            there: list[str] = []
            if self._answers[number] is None:  # an answer to it comes before one to a later question
                there = self._answered({"is": "list"}, "list the services")["names"]
            answer = self._answers[number]
        if answer is not None:
            texts = {key: str(answer[key]) for key in ("socket", "address", "who")}
            return Place(**texts, port=int(answer["port"]))
        known = f"there is {', '.join(map(repr, there))}" if there else "nothing is exposed"
        if self._is_alone:
            raise ServiceError(
                f"there is no service {name!r}.",
                why=f"this process was started without roles, and is all of its run: {known}.",
                hint="farspan run --role actor=4 --role learner=1 script.py",
            )
        raise DeadlineError(
            f"{describe_process()} waited {timeout_s:g} s for the service {name!r}.",
            why=f"no process has exposed it: {known}.",
            hint=f'farspan.expose("{name}", object) in the process that has it; farspan.service(name, timeout=seconds)',
        )

    def _answered(self, question: dict[str, Any], to_do: str) -> dict[str, Any]:
        """Returns the answer to what is answered at once."""
        with self._condition, self._asked(question) as number:
            self._wait(number, _ANSWER_S)
            answer = self._answers[number]
        if answer is None:
            raise LaunchError(
                f"{describe_process()} waited for the launcher to {to_do}.",
                why="it has ended." if self._is_over else f"it has not answered for {_ANSWER_S:g} s.",
            )
        return answer

    @contextlib.contextmanager
    def _asked(self, question: dict[str, Any]) -> Generator[int]:
        """Sends a question, and keeps the answer to it during the body; gives its number."""
        number = next(self._numbers)
        self._answers[number] = None
        self._lines.send({**question, "id": number})
        try:
            yield number
        finally:
            del self._answers[number]

    def _wait(self, number: int, timeout_s: float) -> None:
        self._condition.wait_for(lambda: self._is_over or self._answers[number] is not None, timeout_s)

    def _listen(self) -> None:
        try:
            while True:
                message = self._lines.receive()
                with self._condition:
                    if message["id"] in self._answers:
                        self._answers[message["id"]] = message
                        self._condition.notify_all()
        except (EOFError, KeyError, TypeError):
            with self._condition:
                self._is_over = True
                self._condition.notify_all()


def has_other_hosts() -> bool:
    """Returns whether processes of the run are on other hosts too."""
    return settings.text("HOSTS") not in ("", "1")


_lock = threading.Lock()
_names_of: dict[int, Names] = {}
"""By process: a forked one has a connection of its own."""


def names_of_run() -> Names:
    """Returns this process's connection with the directory of its run."""
    with _lock:
        found = _names_of.get(os.getpid())
        if found is None:
            found = _names_of[os.getpid()] = _connect()
        return found


def _connect() -> Names:
    folder = settings.text("SERVICES")
    if folder:
        return Names(folder)
    folder = tempfile.mkdtemp(prefix="farspan-run-")
    sweeper, directory, process = Sweeper(folder), Directory(folder), os.getpid()

    def end() -> None:
        if os.getpid() == process:
            directory.close()
            sweeper.close()

    at_process_end(end)
    return Names(folder, is_alone=True)
