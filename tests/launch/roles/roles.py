"""A run of several roles in a launcher of its own, as a user would start it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.hangs.hangs import ended_in_time
from tests.support.launcher import HEAD, READY, SOURCE, TIMEOUT_S, wait_until

__all__ = ["RunOfRoles"]


_LAUNCH = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest in the background ignores it
from farspan.cli.main import main
sys.exit(main({argv!r}[1:]))
"""


class RunOfRoles:
    """The script has `role`, `rank` and `here`, its folder; `ready()` says there that a process has come so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None

    def start(self, script: str, *options: str) -> None:
        path = self.folder / "script.py"
        ready = READY.replace("ready{rank}", "{role}{rank}")
        path.write_text(
            f"{HEAD}import farspan\nrole = farspan.role()\ndef ready():\n    {ready.replace(chr(10), '; ')}\n{script}"
        )
        with (self.folder / "err").open("w") as err:
            self.process = self._launch(path, options, err.fileno())

    def _launch(self, path: Path, options: Sequence[str], err: int) -> subprocess.Popen[str]:
        command = ["farspan", "run", "--log-dir", str(self.folder / "logs"), *options, str(path)]
        return subprocess.Popen(
            [sys.executable, "-c", _LAUNCH.format(argv=command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            env=os.environ | {"PYTHONPATH": str(SOURCE)},
        )

    def end(self) -> tuple[int, str, str]:
        assert self.process is not None
        out, _ = ended_in_time(self.process, TIMEOUT_S, self.folder / "logs")
        return self.process.returncode, out, self.said()

    def said(self) -> str:
        """What the launcher has written so far, and the last role's first rank."""
        return (self.folder / "err").read_text()

    def wait_until_said(self, text: str) -> None:
        wait_until(lambda: text in self.said())

    def run(self, script: str, *options: str) -> tuple[int, str, str]:
        self.start(script, *options)
        return self.end()

    def pid(self, process: str) -> int:
        """The number of a process once it is ready; the file is removed, so that its next start can be seen."""
        path = self.folder / process
        wait_until(path.exists)
        number = int(path.read_text())
        path.unlink()
        return number

    def log(self, path: str) -> str:
        return (self.folder / "logs" / path).read_text()

    def close(self) -> None:
        if self.process is not None:
            with self.process:
                self.process.kill()
