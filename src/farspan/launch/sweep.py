"""Removes a folder once the process that made it has ended, however that was: SIGKILL leaves no time to do it.

    process --holds the only entrance of--> a pipe --> python -I -S sweep.py FOLDER    waits for the end of the pipe,
                                                                                       and for those who use the folder,
                                                                                       removes it, ends

Run as a file, it imports nothing of farspan: this is on the way of every start (about 15 ms, and not waited for).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import subprocess

__all__ = ["Sweeper", "use"]

_ENDING_S = 5
_LOCK = "in_use"


class Sweeper:
    """Removes `folder` when this process has ended, or at `close`; not where no process can be started for it."""

    def __init__(self, folder: str) -> None:
        import subprocess

        self._process: subprocess.Popen[bytes] | None = None
        exit_fd, self._entrance_fd = os.pipe()
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, folder],
                stdin=exit_fd,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        os.close(exit_fd)
        os.register_at_fork(after_in_child=self._let_go)

    def close(self) -> None:
        """The folder may go now; returns when its process has ended."""
        import subprocess

        self._let_go()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDING_S)

    def _let_go(self) -> None:
        """A child that was forked must not hold the pipe open: it may live on."""
        if self._entrance_fd >= 0:
            os.close(self._entrance_fd)
            self._entrance_fd = -1


def use(folder: str) -> None:
    """Keeps `folder` until this process, with all that it forks, has ended."""
    import fcntl

    lock = os.open(f"{folder}/{_LOCK}", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)


def main(folder: str) -> None:
    """Waits for the end of standard input, and 5 s at most for others who use `folder`; then removes it."""
    import fcntl
    import shutil

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(_ENDING_S)
    with contextlib.suppress(FileNotFoundError, TimeoutError):
        fcntl.flock(os.open(f"{folder}/{_LOCK}", os.O_RDWR), fcntl.LOCK_EX)
    signal.alarm(0)
    shutil.rmtree(folder, ignore_errors=True)


def _give_up(*_: object) -> NoReturn:
    raise TimeoutError


if __name__ == "__main__":
    main(sys.argv[1])
