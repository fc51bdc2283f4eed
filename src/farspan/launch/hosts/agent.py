"""What the launcher has on another host: it starts the ranks there, and passes on what they write and how they end.

Its `main` is started by ssh, with the connection as its standard input and output.
When the connection is lost it ends its ranks, and itself. Each role of a run has an agent of its own in this process,
and a channel of the connection.

    from the launcher   {"do": "check", "argv": [...], "folder": ...}    {"do": "begin", "first": 2, "num_here": 4}
                        {"do": "start", "number": 2, "variables": {...}}
                        {"do": "signal", "number": 2, "signal": 15}
                        {"do": "note_end", "number": 0}                  {"do": "finish", "kills": false}
                        {"do": "member", "number": 2, "message": ...}, about who belongs to the run
                        {"do": "names", "process": 1, "message": ...}, about where services are
                        {"do": "examine", "what": "clock"}, by `farspan doctor`
    to the launcher     {"is": "checked", "has": ...}  {"is": "begun", "port": ..., "keeper": ...}  {"is": "finished"}
                        {"is": "saved", "step": 7}, by rank 0
                        {"is": "output", "number": 2, "data": ...}       {"is": "ended", "number": 2, "code": 0, ...}
                        {"is": "notes", "notes": [...]}                  {"is": "error", "error": [what, why, hint]}
                        {"is": "member", "number": 2, "said": ...}       {"is": "examined", "found": {...}}
                        {"is": "names", "process": 1, "said": ...}
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from farspan.errors import FarspanError, LaunchError
from farspan.launch.attempts import find_command, shared_variables
from farspan.launch.attempts.here import inherited_variables
from farspan.launch.attempts.variables import make_run_folder
from farspan.launch.files import ELSEWHERE
from farspan.launch.hosts.address import free_port
from farspan.launch.hosts.code import code_of, versions
from farspan.launch.hosts.connection import Channel, Connection, Link, LostError, Message
from farspan.launch.hosts.growing.saves import Saves
from farspan.launch.membership import Door
from farspan.launch.memory import MEMORY_VARIABLE, ServedMemory
from farspan.launch.rank.notes import EACH_SAVE_VARIABLE, PROGRESS_VARIABLE, all_notes, note_end, saved_step
from farspan.launch.rank_process import Process
from farspan.launch.roles.relay import SERVICES_VARIABLE, Relay
from farspan.launch.sweep import Sweeper
from farspan.settings import PREFIX

__all__ = ["Agent", "main"]

_SILENCE_S = 60.0
"""The launcher may be stopped for as long, by Ctrl-Z or a debugger."""
_LAST_OUTPUT_S = 2.0
_FROM_LAUNCHER = (PREFIX, "PYTHONHASHSEED", "CUDA_VISIBLE_DEVICES")
"""The variables that the launcher may set begin with one of these."""


class Agent:
    """The ranks of this host.

    Args:
        connection: With the launcher, or the channel of one role.
        own_argv: The script that this host runs; None if the launcher says it, which has been let in by ssh.
        relay: By which the processes of this host reach the directory of services; of a role.
    """

    def __init__(
        self, connection: Connection | Channel, own_argv: Sequence[str] | None = None, relay: Relay | None = None
    ) -> None:
        self._connection: Link = connection
        if isinstance(connection, Connection):
            connection.on_channel = self._open_role
        self._relay = relay
        self._roles: list[threading.Thread] = []
        self._argv = own_argv
        self._is_own = own_argv is not None
        self.code: int | None = None
        """Of the whole run, once the launcher has said it."""
        self._processes: dict[int, Process] = {}
        self._codes: dict[int, int] = {}
        self._variables: dict[str, str] = {}
        self._first = 0
        self._run_folder = ""
        self._progress = ""
        self._sweeper: Sweeper | None = None
        self._door: Door | None = None
        self._saves: Saves | None = None
        self._memory: ServedMemory | None = None
        """The folder of saves in memory of this host; it stays for all starts."""

    def run(self) -> str:
        """Does what the launcher says until it is over, or the connection is lost; returns what is to be said of it."""
        actions = {"check": self._check, "begin": self._begin, "start": self._start, "signal": self._signal}
        actions |= {"note_end": self._note_end, "finish": self._finish, "member": self._tell}
        actions |= {"names": self._tell_process}
        actions |= {} if self._is_own else {"examine": self._examine}
        try:
            while True:
                message = self._connection.receive()
                try:
                    if message["do"] == "over":
                        self.code = int(message["code"])
                        return str(message["text"])
                    actions[str(message["do"])](message)
                except (FarspanError, OSError) as error:
                    self._refuse(message, error)
                except (KeyError, TypeError, ValueError) as error:
                    raise LostError(f"it said what is no message ({error!r})") from None
        except LostError as error:
            return str(error)
        finally:
            self._connection.close()  # first: the ranks have not failed, their host is lost
            self._end_all(signal.SIGKILL)
            if self._memory is not None:
                self._memory.close()
            for role in self._roles:
                role.join()
            if self._roles and self._relay is not None:
                self._relay.close()

    def _open_role(self, channel: Channel) -> None:
        """Lets a role of the run have its ranks here, in a thread of its own."""
        if self._relay is None:
            self._relay = Relay(self._pass_name_on)
        role = Agent(channel, self._argv, self._relay)
        thread = threading.Thread(target=role.run, name=f"farspan-{channel.name}", daemon=True)
        self._roles.append(thread)
        thread.start()

    def _pass_name_on(self, process: int, message: Message) -> None:
        with contextlib.suppress(LostError):  # the main thread hears of it too
            self._connection.send({"is": "names", "process": process, "said": message})

    def _tell_process(self, message: Message) -> None:
        if self._relay is not None:
            self._relay.send(int(message["process"]), dict(message["message"]))

    def _refuse(self, message: Message, error: FarspanError | OSError) -> None:
        parts = [error.what, error.why, error.hint] if isinstance(error, FarspanError) else [str(error), "", ""]
        if message["do"] != "start":
            self._connection.send({"is": "error", "error": parts})
            return
        number, text = message["number"], f"{type(error).__name__}: {error}\n".encode()
        output = {"is": "output", "number": number, "stream": 2, "data": base64.b64encode(text).decode()}
        self._connection.send(output)
        self._connection.send({"is": "ended", "number": number, "code": 1, "notes": [], "saved": None})

    def _check(self, message: Message) -> None:
        if not self._is_own:
            folder = str(message["folder"])
            try:
                os.chdir(folder)
            except OSError as error:
                raise LaunchError(
                    f"{socket.gethostname()} has no folder {folder}.",
                    why=f"{error.strerror}; the script is started in the same folder on all hosts.",
                    hint="folder= in a hosts file",
                ) from None
            self._argv = [str(word) for word in message["argv"]]
        self._connection.send({"is": "checked", "has": {**code_of(self._argv or [""]), **versions()}})

    def _examine(self, message: Message) -> None:
        from farspan.launch.doctor.answer import answer  # a run needs nothing of it

        self._connection.send({"is": "examined", "found": answer(message)})

    def _begin(self, message: Message) -> None:
        self._end_all(signal.SIGKILL)
        given = _given(message["variables"])
        self._first = int(message["first"])
        self._variables = shared_variables(int(message["num_here"]), Path(tempfile.gettempdir())) | given
        self._run_folder = make_run_folder(self._variables, 2, message["files"]) or ""
        self._progress = f"{self._run_folder}/saved" if PROGRESS_VARIABLE in given else ""
        if self._progress:
            self._variables[PROGRESS_VARIABLE] = self._progress
        if EACH_SAVE_VARIABLE in given:  # names a pipe of the launcher's host; any rank may become the first
            self._variables[EACH_SAVE_VARIABLE] = f"{self._run_folder}/each-save"
            self._saves = Saves(self._variables[EACH_SAVE_VARIABLE], self._pass_save_on)
        if given.get(MEMORY_VARIABLE):
            self._memory = self._memory or ServedMemory()
            self._variables |= self._memory.begin(self._variables)
        if self._first:
            Path(self._run_folder, ELSEWHERE).touch()
        self._sweeper = Sweeper(self._run_folder)
        if "FARSPAN_KEEP_GOING" in given:
            self._door = Door(self._run_folder, self._pass_word_on)
        if self._relay is not None:
            self._variables[SERVICES_VARIABLE] = self._relay.folder
        keeper_port = 0 if self._memory is None else self._memory.port
        self._connection.send({"is": "begun", "port": free_port(), "keeper": keeper_port})

    def _start(self, message: Message) -> None:
        number = int(message["number"])
        own = {f"{PREFIX}RANK": str(number), f"{PREFIX}LOCAL_RANK": str(number - self._first)}
        own |= _given(message["variables"])
        if number in self._processes:  # one that stands for itself, and is started again
            self._processes[number].close()
        process = Process(
            number,
            find_command(self._argv or []),
            inherited_variables() | self._variables | own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if number else subprocess.PIPE,
        )
        self._processes[number] = process
        streams = [(process.process.stdout, 1), (process.process.stderr, 2)]
        readers = [
            threading.Thread(target=self._pass_on, args=(number, stream.fileno(), kind), daemon=True)
            for stream, kind in streams
            if stream is not None
        ]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._watch, args=(process, readers), daemon=True).start()

    def _pass_save_on(self) -> None:
        step = saved_step(Path(self._progress))
        if step is not None:
            with contextlib.suppress(LostError):  # the main thread hears of it too
                self._connection.send({"is": "saved", "step": step})

    def _pass_word_on(self, number: int, message: Message) -> None:
        with contextlib.suppress(LostError):  # the main thread hears of it too
            self._connection.send({"is": "member", "number": number, "said": message})

    def _tell(self, message: Message) -> None:
        if self._door is not None:
            self._door.send(int(message["number"]), dict(message["message"]))

    def _pass_on(self, number: int, file: int, stream: int) -> None:
        try:
            while data := os.read(file, 1 << 16):
                text = base64.b64encode(data).decode()
                self._connection.send({"is": "output", "number": number, "stream": stream, "data": text})
        except LostError:  # the main thread hears of it too
            return

    def _watch(self, process: Process, readers: Sequence[threading.Thread]) -> None:
        try:
            code = process.wait()
        except ChildProcessError:  # reaped at the end
            code = 1
        for reader in readers:
            reader.join(_LAST_OUTPUT_S)  # what it has started may hold the other end for longer
        process.has_ended = True
        self._codes[process.number] = code
        message = {"is": "ended", "number": process.number, "code": code, "notes": self._notes()}
        try:
            self._connection.send({**message, "saved": saved_step(Path(self._progress)) if self._progress else None})
        except LostError:
            return

    def _notes(self) -> list[str]:
        return all_notes(self._run_folder) if os.path.isdir(self._run_folder) else []

    def _signal(self, message: Message) -> None:
        process = self._processes.get(int(message["number"]))
        if process is not None:
            process.send(signal.Signals(int(message["signal"])), group=bool(message["group"]))

    def _note_end(self, message: Message) -> None:
        note_end(self._run_folder, int(message["number"]))
        self._connection.send({"is": "notes", "notes": self._notes()})

    def _finish(self, message: Message) -> None:
        self._end_all(signal.SIGKILL if message["kills"] else signal.SIGTERM)
        self._connection.send({"is": "finished"})

    def _end_all(self, leftover: signal.Signals) -> None:
        """Ends what is left over, helpers of ranks that have failed, and ranks that still run."""
        has_failed = any(self._codes.values())
        for process in self._processes.values():
            if not process.has_ended:
                process.send(signal.SIGKILL, group=True)
            elif has_failed:
                process.send(leftover, group=True)
        for process in self._processes.values():
            process.close()
        self._processes, self._codes = {}, {}
        if self._saves is not None:
            self._saves.close()
            self._saves = None
        if self._run_folder and leftover != signal.SIGKILL:  # else the sweeper waits for those who still use it
            shutil.rmtree(self._run_folder, ignore_errors=True)
        if self._door is not None:
            self._door.close()
            self._door = None
        if self._sweeper is not None:
            self._sweeper.close()
        self._sweeper, self._run_folder = None, ""


def _given(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns those of the variables that the launcher may set."""
    return {name: str(text) for name, text in variables.items() if name.startswith(_FROM_LAUNCHER)}


def _do_nothing(*_: object) -> None:
    pass


def main() -> int:
    """Serves the launcher at the other end of standard input and output."""
    # A terminal sends it to all; the launcher passes it on. Not SIG_IGN, which the ranks would inherit.
    signal.signal(signal.SIGINT, _do_nothing)
    read_fd, write_fd = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    Agent(Connection(read_fd, write_fd, silence_s=_SILENCE_S, hang_up=lambda: None)).run()
    return 0
