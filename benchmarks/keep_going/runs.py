"""A run under `farspan run --keep-going` that is watched: what its ranks say through a pipe, and when."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 300.0


@dataclass(kw_only=True)
class Run:
    """A launcher, and what its ranks have said."""

    process: subprocess.Popen[bytes]
    pipe: int
    pids: dict[int, int] = field(default_factory=dict)
    steps: list[tuple[int, int, int, float]] = field(default_factory=list)
    """Rank, step, number of groups, time."""
    rest: bytes = b""

    def listen(self, limit_s: float) -> bool:
        """Take what the ranks say, or return after that time; False then, or when the launcher has ended."""
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
            if kind == "pid":
                self.pids[int(words[0])] = int(words[1])
            else:
                self.steps.append((int(words[0]), int(words[1]), int(words[2]), float(words[3])))
        return True

    def listen_until(self, condition: Any, limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while not condition():
            if not self.listen(end - time.monotonic()) and (time.monotonic() >= end or self.process.poll() is not None):
                return bool(condition())
        return True


def variables() -> dict[str, str]:
    found = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    found.pop("FARSPAN_RECORD", None)
    return found


def start(folder: Path, num_ranks: int, *script: str) -> Run:
    """Starts a script in so many ranks; `{pipe}` among its arguments is the pipe."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "farspan", "run", "-n", str(num_ranks), "--keep-going", "--files", "all"]
    command += ["--log-dir", str(folder / "logs"), *[str(pipe) if each == "{pipe}" else each for each in script]]
    opened = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, env=variables(), stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    return Run(process=process, pipe=opened)
