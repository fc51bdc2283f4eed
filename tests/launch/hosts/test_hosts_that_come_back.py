"""A host of `--hosts` that was lost is tried again while the ranks run, and takes part from the next save on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.launcher import SOURCE, TIMEOUT_S, wait_until

LAUNCHER = """
import sys
from farspan.launch.hosts import fleet, host
from farspan.launch.hosts.growing import absent
from farspan.cli.main import main
from farspan.launch.roles import places
for module in (fleet, places):
    module.is_this_machine = lambda name: name == "localhost"  # the others are this machine under other addresses
fleet.own_address_towards = fleet.resolved = lambda name: "127.0.0.1"
absent._FIRST_PAUSE_S = 0.2
sys.exit(main(sys.argv[1:]))
"""
SSH = """#!/bin/sh
if [ -e "{folder}/away-$1" ]; then echo "$1 has no power" >&2; exit 255; fi
echo $$ > "{folder}/$1/pid"
TMPDIR="{folder}/$1" exec sh -c "$2"
"""
SCRIPT = """
import os, sys, time
from farspan.launch.rank.notes import note_saving
start, ranks, rank = (int(os.environ[f"FARSPAN_{name}"]) for name in ("RESTART", "WORLD_SIZE", "RANK"))
print("begins", start, "of", ranks, flush=True)
os.chdir(sys.argv[2])
open(f"pids-{start}-{rank}.new", "w").write(f"{os.getpid()} {os.getppid()}")
os.rename(f"pids-{start}-{rank}.new", f"pids-{start}-{rank}")
if rank == 0: assert os.environ["FARSPAN_EACH_SAVE"].startswith(os.environ["TMPDIR"])  # a pipe of its own host
until, step = time.monotonic() + 100, 10 * start
while time.monotonic() < until and not (ranks == int(sys.argv[1]) and start):
    if os.path.exists("save") and rank == 0:
        step += 1
        note_saving(step)
        print("saved", flush=True)
    time.sleep(0.02)
"""


class Launcher:
    """On this machine, with hosts that are other addresses of it; a file away-ADDRESS takes one away."""

    def __init__(self, folder: Path, hosts: str, *options: str, whole: int) -> None:
        self.folder = folder
        (folder / "train.py").write_text(SCRIPT)
        ssh = folder / "ssh.sh"
        ssh.write_text(SSH.format(folder=folder))
        ssh.chmod(0o755)
        for name in ("127.0.0.2", "127.0.0.3", "own"):
            (folder / name).mkdir(exist_ok=True)
        words = ["run", "--hosts", hosts, "--ssh", str(ssh), "--max-restarts", "1", "--files", "all"]
        self.output = folder / "output"
        variables = {"PYTHONPATH": str(SOURCE), "FARSPAN_DEADLINE": "60", "TMPDIR": str(folder / "own")}
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, *words, *options, "train.py", str(whole), str(folder)],
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

    def lose(self, address: str, start: int, rank: int) -> None:
        """Takes a host away: its agent and the rank are killed."""
        file = self.folder / f"pids-{start}-{rank}"
        wait_until(lambda: file.exists() or self.process.poll() is not None)
        (self.folder / f"away-{address}").touch()
        for pid in file.read_text().split():
            os.kill(int(pid), signal.SIGKILL)

    def bring_back(self, address: str) -> None:
        (self.folder / f"away-{address}").unlink()

    def end(self) -> tuple[int, str]:
        return self.process.wait(TIMEOUT_S), self.said()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[object]:
    made: list[Launcher] = []

    def start(*words: str, whole: int) -> Launcher:
        made.append(Launcher(tmp_path, *words, whole=whole))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_a_host_that_comes_back_takes_part_from_the_next_save_on_and_no_restart_is_used_up(launch) -> None:
    launcher = launch("127.0.0.3:1,127.0.0.2:1", "--nnodes", "1:2", whole=2)  # rank 0 is not where the launcher is
    launcher.lose("127.0.0.2", 0, 1)
    launcher.wait_for("begins 1 of 1")
    without = "farspan run: without 127.0.0.2: 127.0.0.2 cannot be reached. 127.0.0.2 has no power; it is tried again"
    assert without in launcher.said()
    launcher.bring_back("127.0.0.2")
    launcher.wait_for("farspan run: 127.0.0.2 answers again, and takes part from the next save on")
    assert "begins 2" not in launcher.said()
    (launcher.folder / "save").touch()
    code, said = launcher.end()
    assert code == 0 and "begins 2 of 2" in said, said
    assert "all ranks are started again with the hosts that have come; step 1" in said
    assert said.count("has no power\n") == 1  # the first time, and not each time that it is tried again
    assert said.count("restart 1 of 1") == 1


def test_a_host_that_comes_back_with_another_program_ends_nobody(launch, tmp_path: Path) -> None:
    other = tmp_path / "127.0.0.2" / ".project"
    other.mkdir(parents=True)
    (other / "train.py").write_text(SCRIPT)
    (tmp_path / ".hosts").write_text(f"localhost\n127.0.0.2 folder={other}\n")
    launcher = launch(".hosts", "--nnodes", "1:2", whole=2)
    launcher.lose("127.0.0.2", 0, 1)
    launcher.wait_for("begins 1 of 1")
    (other / "train.py").write_text("another program")
    launcher.bring_back("127.0.0.2")
    launcher.wait_for("127.0.0.2 answers again, and does not take part yet: 127.0.0.2 has another program.")
    (other / "train.py").write_text(SCRIPT)
    launcher.wait_for("127.0.0.2 answers again, and takes part from the next save on")
    (launcher.folder / "save").touch()
    code, said = launcher.end()
    assert code == 0 and "begins 2 of 2" in said, said


def test_a_host_that_is_lost_again_before_the_save_ends_nobody(launch) -> None:
    launcher = launch("localhost:1,127.0.0.2:1", "--nnodes", "1:2", whole=2)
    launcher.lose("127.0.0.2", 0, 1)
    launcher.wait_for("begins 1 of 1")
    launcher.bring_back("127.0.0.2")
    launcher.wait_for("takes part from the next save on")
    (launcher.folder / "away-127.0.0.2").touch()
    os.kill(int((launcher.folder / "127.0.0.2" / "pid").read_text()), signal.SIGKILL)
    launcher.wait_for("127.0.0.2 is lost again before it took part; it is tried again")
    (launcher.folder / "save").touch()
    wait_until(lambda: launcher.said().count("saved\n") >= 4)
    assert "started again" not in launcher.said()
    launcher.bring_back("127.0.0.2")
    code, said = launcher.end()
    assert code == 0 and "begins 2 of 2" in said, said
