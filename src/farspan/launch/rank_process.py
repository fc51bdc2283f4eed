"""Starts one process of a job on this machine, reads its output, and ends it."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import subprocess
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from farspan.errors import LaunchError
from farspan.launch.logs import TAIL_BYTES
from farspan.launch.terminal import Console

__all__ = [
    "Process",
    "Rank",
    "Started",
    "handles_signal",
    "open_log",
    "read_end",
    "send_signal",
    "signal_name",
    "wait_unreaped",
]

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)


class Started(Protocol):
    """A rank that was started, here or on another host."""

    number: int
    log: Path
    has_console: bool
    returncode: int = 0
    """As in subprocess, once it has ended."""
    was_stopped: bool = False
    has_ended: bool = False
    lost: str = ""
    """Why nothing is known of its end, where that is so."""

    def wait(self) -> int: ...
    def handles(self, number: signal.Signals) -> bool: ...
    def send(self, number: signal.Signals, *, group: bool) -> None: ...
    def read_tail(self) -> str:
        """Returns the end of what it wrote."""
        return read_end(self.log).decode("utf-8", errors="replace")

    def give_console(self) -> contextlib.AbstractContextManager[Sequence[int]]:
        """Lets it write to the console from now on; gives the numbers of the files that it is to have for that."""
        ...

    def close(self) -> None: ...


class Process:
    """One process of a job.

    Args:
        number: Its rank.
        command: What it runs.
        variables: All of its environment.
        stdin: As in subprocess.
        stdout: As in subprocess.
        stderr: As in subprocess.
    """

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        variables: Mapping[str, str],
        *,
        stdin: int | None,
        stdout: int | None,
        stderr: int | None,
    ) -> None:
        self.number = number
        self.has_ended = False
        self.process = subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=stderr, env=variables, start_new_session=True
        )

    def wait(self) -> int:
        """Blocks until the process ends, and leaves it unreaped, so that its number stays its own."""
        return wait_unreaped(self.process.pid) if hasattr(os, "waitid") else self.process.wait()

    def handles(self, number: signal.Signals) -> bool:
        """Returns whether the process handles a signal instead of being ended by it; False where that is not known."""
        return handles_signal(self.process.pid, number)

    def send(self, number: signal.Signals, *, group: bool) -> None:
        """Signals the process, or it and all that it started and that stayed in its group."""
        if self.process.returncode is None:
            send_signal(self.process.pid, number, group=group)

    def close(self) -> None:
        self.process.wait()


class Rank(Process, Started):
    """A process whose output goes to its log, and, where it has the console, there too.

    Args:
        number: Its rank.
        command: What it runs.
        variables: All of its environment.
        log: The file of its log.
        has_console: Whether it has our stdin, stdout and stderr.
    """

    def __init__(
        self, number: int, command: Sequence[str], variables: Mapping[str, str], log: Path, *, has_console: bool
    ) -> None:
        self.log, self.has_console = log, has_console
        file = open_log(log)
        self._console = Console(file) if has_console else None
        stdout, stderr = (file, file) if self._console is None else (self._console.stdout, self._console.stderr)
        try:
            super().__init__(
                number,
                command,
                variables,
                stdin=None if has_console else subprocess.DEVNULL,
                stdout=None if stdout == 1 else stdout,
                stderr=stderr,
            )
        finally:
            os.close(file)
            if self._console is not None:
                self._console.start()

    def wait(self) -> int:
        """Blocks until the process has ended, and what it wrote is on the console."""
        try:
            return super().wait()
        finally:
            if self._console is not None:
                self._console.finish()

    def send(self, number: signal.Signals, *, group: bool) -> None:
        """Signals the process, or it and all that it started and that stayed in its group."""
        super().send(number, group=group)
        if self._console is not None and number in _ENDS:
            self._console.hurry()

    @contextlib.contextmanager
    def give_console(self) -> Generator[Sequence[int]]:
        """Gives our stdout and stderr; its log goes on."""
        file = open_log(self.log, is_new=False)
        console = Console(file)
        os.close(file)
        yield console.stdout, console.stderr
        console.start()
        self._console, self.has_console = console, True


def wait_unreaped(pid: int) -> int:
    """Blocks until a process ends, and returns how, as in subprocess."""
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if info is None or info.si_code == os.CLD_EXITED:
        return 0 if info is None else info.si_status
    return -info.si_status


def handles_signal(pid: int, number: signal.Signals) -> bool:
    """Returns whether a process handles a signal; False where that is not known."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)


def send_signal(pid: int, number: signal.Signals, *, group: bool) -> None:
    """Signals a process that is not reaped, or its group; one that has ended hears nothing."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if group else os.kill)(pid, number)


def signal_name(number: int) -> str:
    """Returns the name of a signal, for people."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_end(path: Path) -> bytes:
    """Returns the last bytes of a log."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read()


def open_log(path: Path, *, is_new: bool = True) -> int:
    """Returns a file descriptor of a log, which is emptied if it is new.

    Raises:
        LaunchError: It cannot be written, or is no regular file.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would wait for a reader
    try:
        file = os.open(path, flags, 0o644)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(errno.EINVAL, "it is no regular file")
        if is_new:
            os.ftruncate(file, 0)
    except OSError as error:
        raise LaunchError(
            f"the log {path} cannot be written.", why=f"{error.strerror}.", hint="another --log-dir"
        ) from None
    return file
