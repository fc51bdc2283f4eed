"""A host of `--hosts` that was lost is tried again while the ranks run, and takes part from the next save on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.hosts.away import BEGIN, Launcher
from tests.support.launcher import wait_until

SAVES = """
from farspan.launch.rank.notes import note_saving
print("begins", start, "of", ranks, flush=True)
if rank: assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # Ctrl-C ends it
if rank == 0: assert os.environ["FARSPAN_EACH_SAVE"].startswith(os.environ["TMPDIR"])  # a pipe of its own host
until, step = time.monotonic() + 100, 10 * start
while time.monotonic() < until and not (ranks == 2 and start):
    if os.path.exists("save") and rank == 0:
        step += 1
        note_saving(step)
        print("saved", flush=True)
    time.sleep(0.02)
"""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[object]:
    made: list[Launcher] = []

    def start(hosts: str) -> Launcher:
        options = ("--nnodes", "1:2", "--max-restarts", "1")
        made.append(Launcher(tmp_path, hosts, *options, script=SAVES))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_a_host_that_comes_back_takes_part_from_the_next_save_on_and_no_restart_is_used_up(launch) -> None:
    launcher = launch("127.0.0.3:1,127.0.0.2:1")  # rank 0 is not where the launcher is
    launcher.lose("127.0.0.2", "0-1")
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
    (other / "train.py").write_text(BEGIN + SAVES)
    (tmp_path / ".hosts").write_text(f"localhost\n127.0.0.2 folder={other}\n")
    launcher = launch(".hosts")
    launcher.lose("127.0.0.2", "0-1")
    launcher.wait_for("begins 1 of 1")
    (other / "train.py").write_text("another program")
    launcher.bring_back("127.0.0.2")
    launcher.wait_for("127.0.0.2 answers again, and does not take part yet: 127.0.0.2 has another program.")
    (other / "train.py").write_text(BEGIN + SAVES)
    launcher.wait_for("127.0.0.2 answers again, and takes part from the next save on")
    (launcher.folder / "save").touch()
    code, said = launcher.end()
    assert code == 0 and "begins 2 of 2" in said, said


def test_a_host_that_is_lost_again_before_the_save_ends_nobody(launch) -> None:
    launcher = launch("localhost:1,127.0.0.2:1")
    launcher.lose("127.0.0.2", "0-1")
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
