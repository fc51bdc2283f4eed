"""Another host and its ranks, as the launcher sees them."""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import queue
import signal
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from farspan.errors import LaunchError
from farspan.launch.hosts.address import own_address_towards, resolved
from farspan.launch.hosts.connection import Channel, Connection, Link, LostError, Message
from farspan.launch.hosts.host import Host
from farspan.launch.job import Events, Noted
from farspan.launch.membership import MemberService
from farspan.launch.rank.notes import EACH_SAVE_VARIABLE, PROGRESS_VARIABLE, add_notes, note_saving
from farspan.launch.rank_process import Started, open_log
from farspan.launch.roles.directory import Away
from farspan.launch.terminal import write_all, write_stderr

__all__ = ["RemoteHost", "RemoteRank"]

_ANSWER_S = 60.0
_ENDING_S = 10.0
_CODE_OF_LOST = 255


class RemoteRank(Started):
    """A rank on another host; what it writes goes to a log here, and, where it has the console, there too."""

    def __init__(self, number: int, connection: Link, log: Path, *, has_console: bool) -> None:
        self.number = number
        self.has_console = has_console
        self.log = log
        self._file = open_log(self.log)
        self._connection = connection
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._code = 0

    def wait(self) -> int:
        """Blocks until its host says that it has ended, or is lost."""
        self._end.wait()
        return self._code

    def handles(self, number: signal.Signals) -> bool:
        """Nothing is known of that."""
        return False

    def send(self, number: signal.Signals, *, group: bool) -> None:
        """Signals it, or it and all that it started."""
        try:
            self._connection.send({"do": "signal", "number": self.number, "signal": int(number), "group": group})
        except LostError:  # its end has come, or will
            return

    @contextlib.contextmanager
    def give_console(self) -> Generator[Sequence[int]]:
        """Nothing goes there: what it writes comes from its host, and is written to the console here from now on."""
        self.has_console = True
        yield ()

    def write(self, data: bytes, stream: int) -> None:
        """Takes what it has written."""
        with self._lock:
            if self._file >= 0:  # else it has ended, and who it has started still writes
                write_all(self._file, data)
        if self.has_console and stream == 2:
            write_stderr(data)
        elif self.has_console:
            write_all(1, data)

    def end(self, code: int, lost: str = "") -> None:
        """Takes how it ended."""
        self._code, self.lost = code, lost
        self._end.set()

    def close(self) -> None:
        self._end.wait(_ENDING_S)
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


class RemoteHost:
    """The agent on another host.

    Args:
        host: Which.
        connection: With it, or the channel of one role.
        own_address: Of this machine, as that host sees it; "" for what the routes say.
        address: From which that host has come; "" where it is reached by its name.
        knows_secret: Whether it knows FARSPAN_SECRET by itself: then it is not sent.
    """

    def __init__(
        self,
        host: Host,
        connection: Connection | Channel,
        *,
        own_address: str = "",
        address: str = "",
        knows_secret: bool = False,
    ) -> None:
        self.host = host
        self._address = address
        self.keeper_port = 0
        """Where the memory of that host is served, in this start; 0 if it has none."""
        self._own_address = own_address
        self._knows_secret = knows_secret
        self.is_lost = False
        self._when_lost: list[Callable[[], object]] = []
        self.members: MemberService | None = None
        self.names: Away | None = None
        """The processes there, for the directory of services."""
        self._connection = connection
        self._parts: dict[str, RemoteHost] = {}
        self._parts_lock = threading.Lock()
        self._ranks: dict[int, RemoteRank] = {}
        self._answers: queue.SimpleQueue[Message | LostError] = queue.SimpleQueue()
        self._events: Events | None = None
        self._variables: dict[str, str] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def address(self) -> str:
        """Returns the address by which other hosts reach that one."""
        self._address = self._address or resolved(self.host.name)
        return self._address

    @property
    def own_address(self) -> str:
        """Returns the address of this machine by which that host reaches it."""
        self._own_address = self._own_address or own_address_towards(self.host.name)
        return self._own_address.removeprefix("::ffff:")

    def part(self, role: str) -> RemoteHost:
        """Returns the same host for one role of the run, whose ranks have starts and ends of their own."""
        assert isinstance(self._connection, Connection)
        with self._parts_lock:
            if role not in self._parts:
                channel, addresses = self._connection.channel(role), (self._own_address, self._address)
                self._parts[role] = RemoteHost(
                    self.host, channel, own_address=addresses[0], address=addresses[1], knows_secret=self._knows_secret
                )
            return self._parts[role]

    def ask(self, message: Message, answer: str) -> Message:
        """Says something to which there is an answer, and returns it.

        Raises:
            LostError: The host does not answer.
            LaunchError: It cannot do it, and says why.
        """
        self._connection.send(message)
        try:
            found = self._answers.get(timeout=_ANSWER_S)
        except queue.Empty:
            raise LostError(f"it has not answered {message['do']!r} for {_ANSWER_S:g} s") from None
        if isinstance(found, LostError):
            raise found
        if found["is"] == "error":
            what, why, hint = (str(text) for text in found["error"])
            raise LaunchError(f"{self.host.name}: {what}", why=why, hint=hint)
        if found["is"] != answer:
            raise LostError(f"it answered {found['is']!r} and not {answer!r}")
        return found

    def begin(self, events: Events, variables: dict[str, str], *, first: int, num_ranks: int, files: str | None) -> int:
        """Lets it get ready for ranks; returns a free port there."""
        self._events, self._variables = events, variables
        given = {name: text for name, text in variables.items() if name.startswith(("FARSPAN_", "PYTHONHASHSEED"))}
        if self._knows_secret:
            given.pop("FARSPAN_SECRET", None)
        if self.host.devices:
            given["CUDA_VISIBLE_DEVICES"] = self.host.devices
        message = {"do": "begin", "variables": given, "first": first, "num_here": num_ranks, "files": files}
        answer = self.ask(message, "begun")
        self.keeper_port = int(answer["keeper"])
        return int(answer["port"])

    def start(self, number: int, variables: Mapping[str, str], log: Path, *, has_console: bool) -> RemoteRank:
        """Starts a rank there, with variables of its own."""
        rank = RemoteRank(number, self._connection, log, has_console=has_console)
        self._ranks[number] = rank
        try:
            self._connection.send({"do": "start", "number": number, "variables": dict(variables)})
        except LostError as error:
            rank.end(_CODE_OF_LOST, f"its host {self.host.name} is lost: {error}")
        return rank

    def note_end(self, number: int) -> None:
        """Lets its ranks know that one has ended."""
        try:
            self._connection.send({"do": "note_end", "number": number})
        except LostError:
            return

    def finish(self, *, kills: bool) -> None:
        """Ends what is left there."""
        if not self.is_lost:
            try:
                self.ask({"do": "finish", "kills": kills}, "finished")
            except LostError:
                self._lose()
        self._ranks = {}

    def when_lost(self, action: Callable[[], object]) -> None:
        """Does something once that host is lost; at once, where it is."""
        with self._parts_lock:
            if not self.is_lost:
                self._when_lost.append(action)
                return
        action()

    def _lose(self) -> None:
        with self._parts_lock:
            self.is_lost = True
            actions, self._when_lost = self._when_lost, []
        for action in actions:
            action()

    def tell_process(self, number: int, message: Message) -> None:
        """Sends an answer of the directory of services to a process there."""
        with contextlib.suppress(LostError):  # its end has come, or will
            self._connection.send({"do": "names", "process": number, "message": message})

    def say_over(self, code: int, text: str) -> None:
        """Lets it know that the run is over, or that it does not take part."""
        with contextlib.suppress(LostError):  # it has ended first
            self._connection.send({"do": "over", "code": code, "text": text})

    def close(self) -> None:
        """Hangs up: its agent ends."""
        self._connection.close()

    def _listen(self) -> None:
        try:
            while True:
                message = self._connection.receive()
                try:
                    self._take(message)
                except (KeyError, TypeError, ValueError):
                    raise LostError("it said what is no message") from None
                except OSError as error:  # else nobody would hear of the ends of its ranks any more
                    raise LostError(f"what a rank there wrote cannot be written here ({error.strerror})") from None
        except LostError as error:
            if self.names is not None:  # before others hear that it is lost, and take its address away
                self.names.close()
            self._lose()
            for rank in list(self._ranks.values()):
                rank.end(_CODE_OF_LOST, f"its host {self.host.name} is lost: {error}")
            self._answers.put(error)
            self._connection.close()

    def _take(self, message: dict[str, Any]) -> None:
        kind = message.get("is")
        rank = self._ranks.get(message.get("number", -1))
        if kind == "output" and rank is not None:
            rank.write(base64.b64decode(message["data"]), message["stream"])
        elif kind == "ended" and rank is not None:
            self._add_notes(message["notes"])
            if message["saved"] is not None:
                note_saving(int(message["saved"]), self._variables.get(PROGRESS_VARIABLE, ""), ())
            rank.end(int(message["code"]))
        elif kind == "saved":
            saved_at, each_save = (self._variables.get(name, "") for name in (PROGRESS_VARIABLE, EACH_SAVE_VARIABLE))
            note_saving(int(message["step"]), saved_at, (each_save,))
        elif kind == "member" and self.members is not None:
            number = int(message["number"])
            self.members.hear_away(number, dict(message["said"]), functools.partial(self._tell, number))
        elif kind == "names" and self.names is not None:
            self.names.hear(int(message["process"]), dict(message["said"]))
        elif kind == "notes":
            self._add_notes(message["notes"])
        elif kind in ("checked", "begun", "finished", "examined", "error"):
            self._answers.put(message)

    def _tell(self, number: int, message: dict[str, Any]) -> None:
        """Sends a message of the launcher's to a rank there, about who belongs to the run."""
        with contextlib.suppress(LostError):  # its end has come, or will
            self._connection.send({"do": "member", "number": number, "message": message})

    def _add_notes(self, notes: list[str]) -> None:
        add_notes(self._variables.get("FARSPAN_RUN_FOLDER", ""), notes)
        if self._events is not None:
            self._events.put(Noted())
