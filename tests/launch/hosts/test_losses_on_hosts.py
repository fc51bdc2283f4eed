"""`farspan run --hosts --keep-going`: a group on one of two hosts is lost, and the one on the other goes on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.launch.hosts.test_run_on_hosts import Run
from tests.launch.joining.hosts import ADDRESSES, Hosts, are_possible, two_hosts
from tests.support.launcher import wait_until

pytestmark = pytest.mark.skipif(not are_possible(), reason="needs root and network namespaces")

TRAINS = """
import os, signal, sys, time, torch, farspan
from torch import nn
rank = int(os.environ["FARSPAN_RANK"])
torch.manual_seed(0)
model = farspan.distribute(nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]), data_parallel=2)
group = farspan.data_rank()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(4, 8) + group).square().mean().backward()
    if step == 3 and rank == int(sys.argv[1]): os.kill(os.getpid(), signal.SIGKILL)
    print("step", step, "group", group, farspan.data_rank(), farspan.data_world(), flush=True)
    while step == 3 and os.path.exists("wait"): time.sleep(0.01)
    optimizer.step()
print("over", farspan.data_rank(), farspan.data_world())
"""


SAVES = """
import os, sys, time, torch, farspan
from torch import nn
start = os.environ["FARSPAN_RESTART"]
torch.manual_seed(0)
model = farspan.distribute(nn.Linear(8, 8), data_parallel=int(os.environ["FARSPAN_WORLD_SIZE"]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = farspan.load("checkpoints", model=model, optimizer=optimizer).step if farspan.latest("checkpoints") else 0
print("begins at", step, "start", start, flush=True)
until = time.monotonic() + 100
while time.monotonic() < until and (start == "0" or step % 5):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    step += 1
    farspan.save("checkpoints", model=model, optimizer=optimizer, step=step).wait()
    print("saved", step, "groups", farspan.data_world(), flush=True)
print("over", farspan.data_world())
"""


@pytest.fixture
def hosts():
    with two_hosts() as made:
        yield made


def run_on(hosts: Hosts, folder: Path, victim: int) -> Run:
    options = ("--hosts", f"localhost:1,{ADDRESSES[1]}:1", "--keep-going", "--files", "all")
    return Run(hosts, folder, TRAINS, str(victim), options=options)


def test_the_first_rank_is_lost_and_one_on_another_host_has_its_roles(hosts: Hosts, tmp_path: Path) -> None:
    code, output = run_on(hosts, tmp_path, 0).end()
    assert code == 0, output
    assert "rank 0 was killed by SIGKILL; the run goes on without rank 0\n" in output, output
    assert "step 2 group 0 0 2" in output and "step 4 group 1 0 1" in output and "over 0 1" in output, output
    assert "1 of 2 groups of ranks goes on: from step 3 " in output


def test_a_host_that_is_cut_off_is_lost(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    run = run_on(hosts, tmp_path, -1)
    wait_until(lambda: "step 3 " in run.output.read_text())
    hosts.cut(0, 1)
    (tmp_path / "wait").unlink()
    code, output = run.end()
    assert code == 0, output
    assert "the run goes on without rank 1\n" in output and "over 0 1" in output, output


def test_a_group_comes_back_with_its_host_after_a_save(hosts: Hosts, tmp_path: Path) -> None:
    options = ("--hosts", f"localhost:1,{ADDRESSES[1]}:1", "--keep-going", "--max-restarts", "1", "--files", "all")
    run = Run(hosts, tmp_path, SAVES, options=options)
    wait_until(lambda: "saved 2 groups 2" in run.output.read_text())
    pids = subprocess.run(["ip", "netns", "pids", f"{hosts.name}1"], capture_output=True, text=True, check=True)
    subprocess.run(["kill", "-9", *pids.stdout.split()], check=True)
    code, output = run.end()
    assert code == 0 and output.endswith("over 2\n"), output
    assert "the run goes on without rank 1\n" in output and " groups 1\n" in output, output
    assert f"{ADDRESSES[1]} answers again, and takes part from the next save on" in output
    assert "all ranks are started again with the hosts that have come" in output and "restart 1 of 1" not in output
