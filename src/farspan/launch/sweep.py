"""Removes a folder once the process that made it has ended, however that was: SIGKILL leaves no time to do it.

    process --holds the only entrance of--> a pipe --> python -I -S sweep.py FOLDER    waits for the end of the pipe,
                                                                                       removes the folder, ends

Run as a file, it imports nothing of farspan: this is on the way of every start (about 15 ms, and not waited for).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

__all__ = ["Sweeper"]

_TRIES = 10
_PAUSE_S = 0.5
_ENDING_S = 5.0


class Sweeper:
    """Removes `folder` when this process has ended, or at `close`; not where no process can be started for it."""

    def __init__(self, folder: str) -> None:
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
        self._let_go()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDING_S)

    def _let_go(self) -> None:
        """A child that was forked must not hold the pipe open: it may live on."""
        if self._entrance_fd >= 0:
            os.close(self._entrance_fd)
            self._entrance_fd = -1


def main(folder: str) -> None:
    """Waits for the end of standard input; then removes `folder`, which others of the run may be about to use."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    for _ in range(_TRIES):
        if not os.path.exists(folder):
            return
        time.sleep(_PAUSE_S)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
