"""What a script finds when it asks whether it is one of several processes: that it is one, before and after."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.launcher import TIMEOUT_S
from tests.support.ranks import ROOT, SOURCES, free_port, run_processes

HELPERS = """
import os
import torch, torch.distributed as dist
from torch import nn
import farspan

def get_world_size():
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size()

def train(steps=2):
    torch.manual_seed(0)
    model = farspan.distribute(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)], nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * get_world_size())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()
"""
ASKS = (
    HELPERS
    + """
from farspan.torch_private import has_step_hooks
print(int(os.environ.get("RANK", -1)) != -1, get_world_size(), os.environ.get("WORLD_SIZE"))
loss = train()
print(dist.is_initialized(), get_world_size(), f"{loss:.6f}")
print(has_step_hooks(torch.optim.SGD([nn.Parameter(torch.ones(1))])))
"""
)
FAILS = ASKS + "raise ValueError('the script fails')\n"
IS_ALONE = (
    "import os\nfor name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'): del os.environ[name]\n"
)
"""A process without a launcher."""
INITIALISES_LATER = (
    HELPERS
    + """
train()
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
print(ones.item(), train.__name__)
dist.destroy_process_group()
"""
)
FAILS_LATER = INITIALISES_LATER + "train()\nif os.environ['RANK'] == '1': raise ValueError('no more data')\ntrain()\n"


def start(folder: Path, text: str, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(text)
    outer = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"} if "farspan" in command else {}
    path = os.pathsep.join([SOURCES, ROOT])
    return subprocess.run(
        [sys.executable, *command, str(script)],
        env={**os.environ, **outer, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_a_script_under_farspan_run_finds_one_process_and_has_standard_output_for_itself(tmp_path: Path) -> None:
    """Also where it fails; no group of ranks outlives the interpreter, which would abort."""
    together = start(tmp_path, FAILS, "-m", "farspan", "run", "-n", "2")
    (tmp_path / "alone.py").write_text(IS_ALONE + ASKS)
    (alone,) = run_processes(1, tmp_path / "alone.py")
    assert (alone.code, together.returncode) == (0, 1), together.stderr
    assert alone.stdout.splitlines()[0] == "False 1 None"
    assert together.stdout == alone.stdout
    assert together.stdout.splitlines()[-1] == "False"  # a hook would make each rank run all of a step
    assert "rank:1" in together.stderr  # the plan
    assert "ValueError: the script fails" in together.stderr
    assert "terminate called" not in together.stderr


def test_a_group_that_the_script_sets_up_after_distribute_is_its_own(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(INITIALISES_LATER)
    finished = run_processes(2, script)
    assert [process.stderr for process in finished if process.code] == []
    assert [process.stdout.strip() for process in finished] == ["2.0 train"] * 2


def test_torchruns_store_is_shared_with_its_agent_which_reports_the_rank_that_fails(tmp_path: Path) -> None:
    """Its variables are spoken of once."""
    port = f"--master-port={free_port()}"
    done = start(tmp_path, FAILS_LATER, "-m", "torch.distributed.run", "--nproc-per-node=2", port)
    assert done.returncode != 0
    cause = done.stderr[done.stderr.index("Root Cause") :]
    assert "rank      : 1" in cause and "ValueError: no more data" in cause
    assert (done.stdout.count("2.0"), done.stdout.count("train")) == (1, 1)
    assert (
        "ValueError: no more data" in done.stderr[: done.stderr.index("Root Cause")]
    )  # also where rank 1 is in a file
    assert done.stderr.count("farspan run -n 2") == 1


@pytest.mark.parametrize("num_ranks", [2])
def test_ranks_meet_at_an_address_of_the_network_too(tmp_path: Path, num_ranks: int) -> None:
    """An address that is not the loopback's: every rank binds to the one that leads there."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation; nothing is sent
        except OSError:
            pytest.skip("this machine has no network")
        address = probe.getsockname()[0]
    script = tmp_path / "program.py"
    script.write_text(ASKS)
    finished = run_processes(num_ranks, script, environment={"MASTER_ADDR": address, "FARSPAN_SAME_HOST": "0"})
    assert [process.stderr for process in finished if process.code] == []
    assert len({process.stdout for process in finished}) == 1


PRINTS = (
    HELPERS
    + """
import sys
print("before", flush=True)
train()
print("after", flush=True)
print("a warning", file=sys.stderr)
"""
)


def _torchrun(folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    port = f"--master-port={free_port()}"
    done = start(folder, PRINTS, "-m", "torch.distributed.run", "--nproc-per-node=2", port, *options, **variables)
    assert done.returncode == 0, done.stderr
    return done


def test_under_torchrun_the_console_is_rank_0s_from_distribute_on(tmp_path: Path) -> None:
    done = _torchrun(tmp_path)
    assert (done.stdout.count("before"), done.stdout.count("after")) == (2, 1)
    assert done.stderr.count("a warning") == 1
    (line,) = [each for each in done.stderr.splitlines() if "FARSPAN_OUTPUT" in each]
    assert line.startswith("farspan: the output of rank 1 is in ")
    log = Path(line.partition(" is in ")[2].partition(";")[0])
    assert log.read_text() == "after\na warning\n"


def test_under_torchrun_every_rank_prints_where_that_is_asked_for(tmp_path: Path) -> None:
    done = _torchrun(tmp_path, FARSPAN_OUTPUT="all")
    assert (done.stdout.count("before"), done.stdout.count("after")) == (2, 2)
    assert "FARSPAN_OUTPUT" not in done.stderr


def test_a_file_that_torchrun_gives_each_rank_stays_its_own(tmp_path: Path) -> None:
    done = _torchrun(tmp_path, "--redirects=3", f"--log-dir={tmp_path / 'logs'}")
    assert "FARSPAN_OUTPUT" not in done.stderr
    outputs = [each.read_text() for each in sorted((tmp_path / "logs").rglob("stdout.log"))]
    assert outputs == ["before\nafter\n"] * 2
