"""A host that comes while the ranks of another one run: it takes part from the next save on, and that is no restart."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.launcher import SOURCE, TIMEOUT_S, wait_until
from tests.support.ranks import free_port

FIRST = """
import sys
from farspan.launch.hosts.joining import joined_fleet as joined
from farspan.cli.main import main
joined._LAST_CALL_S = 0.0  # begins alone at once
sys.exit(main(sys.argv[1:]))
"""
SAVES = """
import os, sys, time
from farspan.launch.rank.notes import note_saving
start, ranks, rank = (int(os.environ[f"FARSPAN_{name}"]) for name in ("RESTART", "WORLD_SIZE", "RANK"))
print("start", start, "of", ranks, flush=True)
if ranks == 2 and start == 1 and rank == 1: sys.exit(3)
until, step = time.monotonic() + 100, 0
while ranks == 1 and time.monotonic() < until:
    if os.path.exists("save") and rank == 0:
        step += 1
        note_saving(step)
        print("saved", flush=True)
    time.sleep(0.02)
"""


class Launchers:
    """That of the first host, and of those that come."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        (folder / "train.py").write_text(SAVES)

    def start(self, *words: str, folder: Path | None = None) -> Path:
        code = ["-c", FIRST] if not self.processes else ["-m", "farspan"]
        output = self.folder / f"output{len(self.processes)}"
        join = ["--join", f"127.0.0.1:{self.port}", "--log-dir", str(self.folder / "logs"), "train.py"]
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *code, "run", "-n", "1", *words, *join],
                cwd=folder or self.folder,
                env=os.environ | {"PYTHONPATH": str(SOURCE), "FARSPAN_DEADLINE": "60"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self.processes.append(process)
        return output

    def wait_for(self, output: Path, text: str, times: int = 1) -> None:
        """Until a launcher that runs has said that."""
        wait_until(lambda: output.read_text().count(text) >= times or self.processes[0].poll() is not None)
        assert output.read_text().count(text) >= times, output.read_text()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Launchers]:
    made = Launchers(tmp_path)
    yield made
    made.close()


def test_a_host_that_comes_takes_part_from_the_next_save_on_and_no_restart_is_used_up(launchers: Launchers) -> None:
    output = launchers.start("--nnodes", "1:2", "--node-rank", "0", "--max-restarts", "1")
    launchers.wait_for(output, "start 0 of 1")
    launchers.start()
    launchers.wait_for(output, "has come")
    assert "started again" not in output.read_text()
    (launchers.folder / "save").touch()
    assert [process.wait(TIMEOUT_S) for process in launchers.processes] == [0, 0], output.read_text()
    said = output.read_text()
    assert "all ranks are started again with the hosts that have come; step " in said
    assert "failed" not in said.partition("rank 1 of 2 failed")[0]  # to be ended for that is no failure
    assert "restart 1 of 1" in said and "start 2 of 2" in said  # a rank fails in the second start
    assert (launchers.folder / "logs" / "restart-2" / "rank1.log").read_text() == "start 2 of 2\n"


def test_a_host_with_another_program_ends_nobody(launchers: Launchers, tmp_path: Path) -> None:
    output = launchers.start("--nnodes", "1:2", "--node-rank", "0", "--max-restarts", "1")
    launchers.wait_for(output, "start 0 of 1")
    other = tmp_path / "other"
    other.mkdir()
    (other / "train.py").write_text("print('another program')\n")
    launchers.start(folder=other)
    assert launchers.processes[1].wait(TIMEOUT_S) == 2
    (launchers.folder / "save").touch()
    launchers.wait_for(output, "saved", 4)
    assert "does not take part" in output.read_text() and "started again" not in output.read_text()
