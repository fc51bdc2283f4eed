"""What programs that are killed say through a pipe, one line at once, whole or not at all; and who hears it."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Heard", "say"]


def say(pipe: str, *words: object) -> None:
    """Writes a line, shorter than what a pipe takes at once."""
    file = os.open(pipe, os.O_WRONLY)
    os.write(file, (" ".join(map(str, words)) + "\n").encode())
    os.close(file)


@dataclass(kw_only=True)
class Heard:
    """A launcher whose processes write into a pipe. Subclasses say what becomes of a line."""

    process: subprocess.Popen[bytes]
    pipe: int
    rest: bytes = b""

    def take(self, kind: str, words: list[str]) -> None:
        """Notes a line: its first word, and the others."""
        raise NotImplementedError

    def listen(self, limit_s: float) -> bool:
        """Take what has been written, or return after that time; False then, or when the launcher has ended."""
        pidfd = os.pidfd_open(self.process.pid)
        try:
            ready = select.select([self.pipe, pidfd], [], [], max(0.0, limit_s))[0]
        finally:
            os.close(pidfd)
        if self.pipe not in ready:
            return False
        *lines, self.rest = (self.rest + os.read(self.pipe, 1 << 16)).split(b"\n")
        for line in lines:
            kind, *words = line.decode().split()
            self.take(kind, words)
        return True

    def listen_until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while not condition():
            if not self.listen(end - time.monotonic()) and (time.monotonic() >= end or self.process.poll() is not None):
                return condition()
        return True
