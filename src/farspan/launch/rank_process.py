"""Starts one process of a job, reads its output, and ends it."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from farspan.errors import LaunchError
from farspan.launch.logs import TAIL_BYTES
from farspan.launch.terminal import Tee

__all__ = ["Rank"]


class Rank:
    """One process and its output; `returncode` is as in subprocess, once it has ended."""

    def __init__(self, number: int, command: Sequence[str], variables: Mapping[str, str], log_dir: Path):
        self.number = number
        self.returncode = 0
        self.was_stopped = False
        self.has_ended = False
        self.log: Path | None = None
        self._tee: Tee | None = None
        stdin: int | None = None
        stdout: int | None = None
        if number == 0:
            self._tee = Tee()
            stderr = self._tee.write_fd
        else:
            self.log = log_dir / f"rank{number}.log"
            stdin = subprocess.DEVNULL
            stdout = stderr = _open_log(self.log)
        try:
            self.process = subprocess.Popen(
                command, stdin=stdin, stdout=stdout, stderr=stderr, env=variables, start_new_session=True
            )
        finally:
            if self._tee is not None:
                self._tee.start()
            else:
                os.close(stderr)

    def wait(self) -> int:
        """Blocks until the process ends, and leaves it unreaped, so that its number stays its own."""
        if not hasattr(os, "waitid"):
            return self.process.wait()
        info = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        if info is None or info.si_code == os.CLD_EXITED:
            return 0 if info is None else info.si_status
        return -info.si_status

    def handles(self, number: signal.Signals) -> bool:
        """Returns whether the process handles a signal instead of being ended by it; False where that is not known."""
        try:
            lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        except OSError:
            return False
        caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
        return bool(caught >> (number - 1) & 1)

    def send(self, number: signal.Signals, *, group: bool) -> None:
        """Signals the process, or it and all that it started and that stayed in its group."""
        if self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if group else os.kill)(self.process.pid, number)

    def read_tail(self) -> str:
        """Returns the end of what it wrote: its log, or for rank 0 its stderr."""
        if self.log is None:
            data = bytes(self._tee.tail) if self._tee is not None else b""
        else:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                data = file.read()
        return data.decode("utf-8", errors="replace")

    def close(self) -> None:
        self.process.wait()
        if self._tee is not None:
            self._tee.stop()


def _open_log(path: Path) -> int:
    """Returns a file descriptor of an empty log.

    Raises:
        LaunchError: It cannot be written, or is no regular file.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would wait for a reader
    try:
        file = os.open(path, flags, 0o644)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(errno.EINVAL, "it is no regular file")
        os.ftruncate(file, 0)
    except OSError as error:
        raise LaunchError(
            f"the log {path} cannot be written.", why=f"{error.strerror}.", hint="another --log-dir"
        ) from None
    return file
