"""A run under `farspan run --keep-going` that is watched: what its ranks say through a pipe, and when."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.recovery.words import Heard

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 300.0


@dataclass(kw_only=True)
class Run(Heard):
    """A launcher, and what its ranks have said."""

    pids: dict[int, int] = field(default_factory=dict)
    steps: list[tuple[int, int, int, float]] = field(default_factory=list)
    """Rank, step, number of groups, time."""

    def take(self, kind: str, words: list[str]) -> None:
        if kind == "pid":
            self.pids[int(words[0])] = int(words[1])
        else:
            self.steps.append((int(words[0]), int(words[1]), int(words[2]), float(words[3])))


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
