"""A launcher whose `--hosts` are other addresses of this machine, by a script in the place of ssh; they may go away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.hangs.hangs import SETUP, ended_in_time
from tests.support.launcher import SOURCE, TIMEOUT_S, wait_until

__all__ = ["BEGIN", "LAUNCHER", "SSH", "Launcher"]

LAUNCHER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest in the background ignores it
from farspan.launch.hosts import fleet
from farspan.launch.hosts.growing import absent
from farspan.cli.main import main
from farspan.launch.roles import places
for module in (fleet, places):
    module.is_this_machine = lambda name: name == "localhost"  # the others are this machine under other addresses
absent._FIRST_PAUSE_S = 0.2
sys.exit(main(sys.argv[1:]))
"""
SSH = """#!/bin/sh
if [ -e "{folder}/away-$1" ]; then echo "$1 has no power" >&2; exit 255; fi
echo "hello from the startup files of $1 {{}}"
echo $$ > "{folder}/$1/pid"
TMPDIR="{folder}/$1" exec sh -c "$2"
"""
BEGIN = (
    SETUP
    + """
import os, signal, sys, time
start, ranks, rank, role = (os.environ.get(f"FARSPAN_{name}", "") for name in ("RESTART", "WORLD_SIZE", "RANK", "ROLE"))
start, ranks, rank = int(start), int(ranks), int(rank)
os.chdir(sys.argv[1])
name = f"{role}{start}-{rank}"
open(f"pids-{name}.new", "w").write(f"{os.getpid()} {os.getppid()}")
os.rename(f"pids-{name}.new", f"pids-{name}")
"""
)


class Launcher:
    """On this machine, with hosts that are other addresses of it; a file away-ADDRESS takes one away."""

    def __init__(
        self, folder: Path, hosts: str, *options: str, script: str, words: tuple[str, ...] = (), deadline_s: int = 60
    ) -> None:
        self.folder = folder
        (folder / "train.py").write_text(BEGIN + script)
        ssh = folder / "ssh.sh"
        ssh.write_text(SSH.format(folder=folder))
        ssh.chmod(0o755)
        for name in ("127.0.0.2", "127.0.0.3", "own"):
            (folder / name).mkdir(exist_ok=True)
        options = ("run", "--hosts", hosts, "--ssh", str(ssh), "--files", "all", *options)
        self.output = folder / "output"
        variables = {"PYTHONPATH": str(SOURCE), "FARSPAN_DEADLINE": str(deadline_s), "TMPDIR": str(folder / "own")}
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, *options, "train.py", str(folder), *words],
                cwd=folder,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    def said(self) -> str:
        return self.output.read_text()

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.said() or self.process.poll() is not None)
        assert text in self.said(), self.said()

    def lose(self, address: str, *processes: str) -> None:
        """Takes a host away: its agent and its processes are killed, once they have begun."""
        files = [self.folder / f"pids-{process}" for process in processes]
        wait_until(lambda: all(file.exists() for file in files) or self.process.poll() is not None)
        (self.folder / f"away-{address}").touch()
        for pid in {int(word) for file in files for word in file.read_text().split()}:
            os.kill(pid, signal.SIGKILL)

    def bring_back(self, address: str) -> None:
        (self.folder / f"away-{address}").unlink()

    def end(self) -> tuple[int, str]:
        ended_in_time(self.process, TIMEOUT_S, self.folder, self.output)
        return self.process.returncode, self.said()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
