"""A launcher in a process of its own, as a user would start it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.hangs.hangs import SETUP, ended_in_time
from tests.support.warm.commands import farspan_run

import farspan

__all__ = ["LAUNCH", "READY", "SOURCE", "TIMEOUT_S", "Job", "is_running", "keep_going", "wait_until"]

SOURCE = Path(farspan.__file__).parents[1]
TIMEOUT_S = 200.0
"""What only a hang reaches, also on a machine under load; below pytest's own limit."""
LAUNCH = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest in the background ignores it
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from farspan.launch.run_job import run
sys.exit(run({argv!r}, {n}, grace_s={grace_s}, **{options!r}))
"""
HEAD = SETUP + "import os, signal, subprocess, sys, time\nrank = int(os.environ['FARSPAN_RANK'])\nhere = sys.path[0]\n"
# A rank that is ready says so with its process id.
READY = "open(f'{here}/ready{rank}.tmp', 'w').write(str(os.getpid()))\n"
READY += "os.rename(f'{here}/ready{rank}.tmp', f'{here}/ready{rank}')\n"


class Job:
    """A launcher in a process of its own, with a script of a few lines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.process: subprocess.Popen[str] | None = None

    def start(
        self, script: str, n: int = 2, *, grace_s: float = 10.0, argv=(), stderr=subprocess.PIPE, **options
    ) -> None:
        path = self.folder / "script.py"
        path.write_text(HEAD + script)
        options.setdefault("log_dir", str(self.logs))
        text = LAUNCH.format(argv=[str(path), *argv], n=n, grace_s=grace_s, options=options)
        self.process = subprocess.Popen(
            [sys.executable, "-c", text],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | {"PYTHONPATH": str(SOURCE), "FARSPAN_FILES": "all"},
        )

    def end(self) -> tuple[int, str, str]:
        assert self.process is not None
        out, err = ended_in_time(self.process, TIMEOUT_S, self.logs)
        return self.process.returncode, out, err

    def run(self, script: str, n: int = 2, **options) -> tuple[int, str, str]:
        self.start(script, n, **options)
        return self.end()

    def log(self, rank: int) -> str:
        return (self.logs / f"rank{rank}.log").read_text()

    def pid(self, rank: int | str) -> int:
        path = self.folder / f"ready{rank}"
        wait_until(path.exists)
        return int(path.read_text())

    def close(self) -> None:
        """Ends the launcher, if it still runs, and closes its pipes."""
        if self.process is not None:
            with self.process:
                self.process.kill()


def wait_until(condition) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether a process runs; one that nobody reaped (no init in this container) has ended too."""
    stat = Path(f"/proc/{pid}/stat")
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def keep_going(
    folder: Path, num_ranks: int, script: Sequence[str], options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs a script under `farspan run --keep-going`, with its logs in the folder; returns how it ended."""
    return farspan_run(["-n", str(num_ranks), "--keep-going", *options, "--log-dir", f"{folder}/logs", *script])
