"""Ranks on two hosts: who is where, a link that is cut, one that comes back, one that is slow."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest
from tests.launch.joining.hosts import ADDRESSES, Hosts, are_possible, two_hosts
from tests.support.ranks import ROOT, SOURCES

pytestmark = pytest.mark.skipif(not are_possible(), reason="needs root and network namespaces")

TRAINS = """
import os, sys, time
import torch
from torch import nn
import farspan

num_steps, pause_s = int(os.environ["STEPS"]), float(os.environ["PAUSE"])
torch.manual_seed(0)
model = farspan.distribute(nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)]))
for step in range(num_steps):  # without an optimizer, for which torch loads much
    model.zero_grad()
    for _ in range(2):
        loss = model(torch.randn(int(os.environ.get("ROWS", 4)), 16)).square().mean()
        loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)
    print("step", step, f"{loss.item():.9f}", flush=True)
    time.sleep(pause_s)
    while step == 3 and os.environ.get("READS") == os.environ["RANK"]:
        model.state_dict()
print("trained", flush=True)
print("read", *[float(item.double().sum()) for item in model.state_dict().values()], flush=True)
"""
ENDS_S = 90.0
"""Long before the deadline, also on a loaded machine; on a quiet one a cut link ends both hosts within 15 s."""


@pytest.fixture
def hosts():
    with two_hosts() as made:
        yield made


class Run:
    """Ranks on both hosts: rank 0 and every other even one on host 0."""

    def __init__(self, hosts: Hosts, folder: Path, num_ranks: int, *, steps: int, pause_s: float, **variables: str):
        script = folder / "script.py"
        script.write_text(TRAINS)
        self.outputs = [folder / f"output{rank}" for rank in range(num_ranks)]
        shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
        shared |= {"OMP_NUM_THREADS": "1", "FARSPAN_DEADLINE": "100", "FARSPAN_FILES": "all"}
        shared |= {"PYTHONPATH": f"{SOURCES}:{ROOT}", "STEPS": str(steps), "PAUSE": str(pause_s), **variables}
        self.processes = [
            hosts.start(rank % 2, script, shared | {"RANK": str(rank)}, self.outputs[rank]) for rank in range(num_ranks)
        ]

    def output(self, rank: int) -> str:
        return self.outputs[rank].read_text()

    def wait_for_step(self, step: int) -> None:
        until = time.monotonic() + 150.0
        while f"step {step} " not in self.output(0):
            assert time.monotonic() < until and self.processes[0].poll() is None, self.output(0)
            time.sleep(0.05)

    def end(self, limit_s: float) -> list[int]:
        """The exit codes of all ranks, which must end within the limit."""
        until = time.monotonic() + limit_s
        try:
            return [process.wait(max(0.0, until - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError("\n".join(self.output(rank) for rank in range(len(self.processes)))) from None
        finally:
            for process in self.processes:
                process.kill()
                process.wait()


def test_ranks_of_two_hosts_train_alike(hosts: Hosts, tmp_path: Path) -> None:
    run = Run(hosts, tmp_path, 3, steps=3, pause_s=0.0, FARSPAN_SECRET="known to all")
    assert run.end(90.0) == [0, 0, 0], run.output(0)
    lines = [[line for line in run.output(rank).splitlines() if line[:4] in ("step", "read")] for rank in range(3)]
    assert len(lines[0]) == 4 and lines[0] == lines[1] == lines[2]


@pytest.mark.parametrize("to", [pytest.param((0, 1), id="both ways"), pytest.param((1,), id="one way")])
def test_a_cut_link_ends_both_hosts_and_is_named(hosts: Hosts, tmp_path: Path, to: tuple[int, ...]) -> None:
    run = Run(hosts, tmp_path, 2, steps=10_000, pause_s=0.05)
    run.wait_for_step(3)
    hosts.cut(*to)
    assert all(run.end(ENDS_S))
    for rank in range(2):
        assert "the link to rank" in run.output(rank), run.output(rank)
        assert "died" not in run.output(rank), run.output(rank)


def test_a_link_that_is_cut_while_one_host_reads_of_the_other_is_named(hosts: Hosts, tmp_path: Path) -> None:
    run = Run(hosts, tmp_path, 2, steps=10_000, pause_s=0.05, READS="1")
    run.wait_for_step(3)
    time.sleep(0.5)
    hosts.cut(0, 1)
    assert all(run.end(ENDS_S))
    for rank in range(2):
        assert "the link to rank" in run.output(rank), run.output(rank)


def test_a_link_that_comes_back_after_two_seconds_is_survived(hosts: Hosts, tmp_path: Path) -> None:
    run = Run(hosts, tmp_path, 2, steps=80, pause_s=0.05)
    run.wait_for_step(3)
    hosts.cut(0, 1)
    time.sleep(2.0)
    hosts.mend(0, 1)
    assert run.end(60.0) == [0, 0], run.output(0)
    assert "trained" in run.output(0) and run.output(0).count("\nstep ") == 80


@pytest.mark.skipif(shutil.which("tc") is None, reason="needs tc")
def test_a_link_on_which_a_transfer_takes_ten_seconds_is_slow_and_not_cut(hosts: Hosts, tmp_path: Path) -> None:
    hosts.slow_down("1mbit")
    run = Run(hosts, tmp_path, 2, steps=2, pause_s=0.0, ROWS="20000")  # 1.28 MB for each micro-batch, and back
    assert run.end(200.0) == [0, 0], run.output(0)
    assert "trained" in run.output(0) and run.output(0).count("\nstep ") == 2
