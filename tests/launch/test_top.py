"""`farspan top`: how far the ranks of a run are."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.ranks import run_processes

from farspan.cli.top.table import REST, table_of, waited_for
from farspan.launch.rank.status import RankStatus, StatusFile, read_statuses

TRAINS = """
import os, subprocess, sys
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # as under farspan run
    os.environ[f"FARSPAN_{name}"] = os.environ.pop(name)
import torch
from torch import nn
import farspan

torch.manual_seed(0)
assert farspan.metrics() == {}
model = farspan.distribute(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), plan={"0": "rank:0", "1": "rank:1"})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
found = farspan.metrics()
assert found["micro_batches"] == 1 and 0 < found["compute_seconds"] < found["step_seconds"] and 0 < found["bubble"] < 1
assert found["memory_bytes"] > 1e6
if farspan.rank() == 0:
    print(subprocess.run([sys.executable, "-m", "farspan", "top", sys.argv[1], "--once"], text=True,
          capture_output=True, check=True).stdout)
"""


def status(
    rank: int, *, step: int = 7, ended_s: float = 100.0, compute_s: float = 0.1, wait_s: float = 0.1
) -> RankStatus:
    return RankStatus(
        rank=rank,
        pid=10 + rank,
        step=step,
        ended_s=ended_s,
        period_s=0.5,
        compute_s=compute_s,
        wait_s=wait_s,
        micro_batches=4,
    )


def test_what_a_rank_writes_is_read_and_nothing_else(tmp_path: Path) -> None:
    for rank in (1, 0):
        own = StatusFile(tmp_path, rank)
        own.write(step=1, compute_s=0.25, wait_s=0.0, micro_batches=2)
        own.write(step=2, compute_s=0.5, wait_s=1.0, micro_batches=2)
    (tmp_path / "rank2.status").write_bytes((tmp_path / "rank0.status").read_bytes()[:100])
    (tmp_path / "rank3.status").write_text("[]".ljust(512))
    (tmp_path / "rank4.status").write_text('{"rank": 4}'.ljust(512))
    (tmp_path / "rank1.log").write_text("a log")
    found = read_statuses(tmp_path)
    assert [(each.rank, each.step, each.compute_s, each.wait_s) for each in found] == [
        (0, 2, 0.5, 1.0),
        (1, 2, 0.5, 1.0),
    ]
    assert all(each.period_s > 0 for each in found)


@pytest.mark.parametrize(
    ("statuses", "now_s", "line"),
    [
        ([], 0.0, ""),
        ([status(0), status(1)], 100.1, ""),
        (
            [status(0, wait_s=0.3), status(1, compute_s=0.3)],
            100.1,
            "the others wait for rank 1: it computes 300 ms of a step, the next 100 ms",
        ),
        ([status(0), status(1, compute_s=0.3, wait_s=0.2)], 100.1, ""),  # it waits itself
        (
            [status(0), status(1, step=6, ended_s=90.0)],
            130.0,
            "rank 1 has not ended step 7; the last step ended 30.0 s ago (kill -USR1 10 shows where all are)",
        ),
        (
            [status(0), status(1)],
            130.0,
            "no rank has ended step 8; the last step ended 30.0 s ago (kill -USR1 10 shows where all are)",
        ),
    ],
)
def test_whom_the_others_wait_for(statuses: list[RankStatus], now_s: float, line: str) -> None:
    assert waited_for(statuses, now_s) == line


@pytest.mark.parametrize(("wait_s", "is_said"), [(0.1, True), (0.39, False)])
def test_what_is_neither_computing_nor_waiting_is_said(wait_s: float, is_said: bool) -> None:
    with io.StringIO() as file:
        statuses = [status(0, wait_s=wait_s), status(1, wait_s=0.4)]
        Console(file=file, width=200).print(table_of(statuses, {10: 1, 11: 1}, 100.1))
        assert (REST in file.getvalue()) == is_said


def test_a_run_is_shown_from_inside(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TRAINS)
    variables = {"LAUNCHER": "run", "LOG_DIR": str(tmp_path), "STORE": str(tmp_path / "store"), "LOCAL_WORLD_SIZE": "2"}
    environment = {f"FARSPAN_{name}": text for name, text in variables.items()}
    first, second = run_processes(2, script, [str(tmp_path)], environment=environment)
    assert first.code == second.code == 0, first.stderr
    head, *rows = first.stdout.splitlines()
    assert head.split() == ["rank", "step", "steps/s", "micro-batches/s", "computes", "waits", "memory", "last", "step"]
    assert [row.split()[:2] for row in rows[:2]] == [["0", "3"], ["1", "3"]]
    assert "ended" not in rows[0] and rows[0].endswith("ago")


def test_a_folder_without_a_run_is_a_clear_error(tmp_path: Path) -> None:
    for folder, words in ((tmp_path, "no rank has said anything"), (tmp_path / "none", "cannot be read")):
        command = [sys.executable, "-m", "farspan", "top", str(folder), "--once"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        assert found.returncode == 2 and words in found.stderr and "try" in found.stderr, found.stderr
