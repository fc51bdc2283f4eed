"""A run of several roles over two launchers, which one machine takes for two hosts."""

from __future__ import annotations

import subprocess

from tests.hangs.hangs import ended_in_time
from tests.launch.roles.roles import RunOfRoles
from tests.support.launcher import TIMEOUT_S

from farspan.launch.hosts.address import free_port

__all__ = ["RunOnHosts"]


class RunOnHosts(RunOfRoles):
    """The first host has one slot, the second one two, unless a test says otherwise."""

    slots = (1, 2)
    nnodes = "2"
    second: subprocess.Popen[str] | None = None

    def start(self, script: str, *options: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        first = ("-n", str(self.slots[0]), "--nnodes", self.nnodes, "--node-rank", "0", "--join", self.address)
        super().start(script, *first, *options)
        self.start_second()

    def start_second(self) -> None:
        """Starts the second launcher, or another one in its place."""
        with (self.folder / "err2").open("w") as err:
            words = ("-n", str(self.slots[1]), "--node-rank", "1", "--join", self.address)
            self.second = self._launch(self.folder / "script.py", words, err.fileno())

    def end_second(self) -> tuple[int, str]:
        """Returns the exit code of the second launcher, and what it has written."""
        assert self.second is not None
        ended_in_time(self.second, TIMEOUT_S, self.folder / "logs")
        return self.second.returncode, (self.folder / "err2").read_text()

    def close(self) -> None:
        super().close()
        if self.second is not None:
            with self.second:
                self.second.kill()
