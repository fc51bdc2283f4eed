"""How a rank's program ends: what others hear, what a forked child leaves alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.support.ranks import run_processes

TRAINS = """
import os, sys
import torch
from torch import nn
import farspan

rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = farspan.distribute(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train():
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    return f"{loss.item():.9f}"
"""


@pytest.mark.parametrize("ends", ["sys.exit(0)", "raise ValueError('of the child')", "os._exit(0)", "pass"])
def test_a_forked_child_that_ends_leaves_the_run_alone(tmp_path: Path, ends: str) -> None:
    script = tmp_path / "script.py"
    forks = f"child = os.fork()\nif child == 0:\n    {ends}\n"
    goes_on = "else:\n    os.waitpid(child, 0)\n    print(train(), train())\n"
    script.write_text(f"{TRAINS}print(train())\nsys.stdout.flush()\n{forks}{goes_on}")
    finished = run_processes(2, script, environment={"FARSPAN_DEADLINE": "20"})
    assert [each.code for each in finished] == [0, 0], finished[0].stderr
    assert "DeadlineError" not in finished[0].stderr + finished[1].stderr  # the child waits for nobody
    assert finished[0].stdout == finished[1].stdout and len(finished[0].stdout.split()) == 3


def test_what_the_program_does_at_its_end_still_has_all_ranks(tmp_path: Path) -> None:
    """The handler was there before `distribute`: the ranks had left when it ran, and the file stayed empty."""
    script = tmp_path / "script.py"
    prepares = "@atexit.register\ndef save():\n    weights = [p.sum().item() for p in model.parameters()]\n"
    script.write_text(
        "import atexit\nimport farspan\n"
        + prepares
        + f"    torch.save(model.state_dict(), f'{tmp_path}/last{{rank}}.pt')\n    print(len(weights))\n"
        + TRAINS
        + "train()\n"
    )
    finished = run_processes(2, script, environment={"FARSPAN_DEADLINE": "20"})
    assert [(each.code, each.stdout) for each in finished] == [(0, "8\n")] * 2, finished[0].stderr
    first, second = (torch.load(tmp_path / f"last{rank}.pt") for rank in range(2))
    assert len(first) == 8 and all(torch.equal(first[name], second[name]) for name in first)


def test_what_nothing_reads_runs_at_the_end(tmp_path: Path) -> None:
    """A class that does not exist, in a loss whose backward no step follows: all seemed to have ended well."""
    script = tmp_path / "script.py"
    script.write_text(
        TRAINS
        + "loss = nn.functional.cross_entropy(model(torch.ones(2, 4)), torch.tensor([1, 9]))\n"
        + "loss.backward()\nprint('the last line')\n"
    )
    first, second = run_processes(2, script, environment={"FARSPAN_DEADLINE": "20"})
    assert first.stdout == second.stdout == "the last line\n"
    assert (first.code, second.code) == (1, 1)
    assert "\nIndexError: Target 9 is out of bounds" in second.stderr, second.stderr
    assert "rank 1 failed: IndexError: Target 9 is out of bounds" in first.stderr, first.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_the_others_are_told_before_the_cause_is_printed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    fails = "if rank == 1:\n    sys.stderr = open('/dev/full', 'w')\n    raise KeyError('the cause')\ntrain()\n"
    script.write_text(TRAINS + fails)
    first, second = run_processes(2, script, environment={"FARSPAN_DEADLINE": "60"})
    assert first.code != 0 and second.code != 0
    assert "rank 1 failed: KeyError: 'the cause'" in first.stderr
    assert first.duration_s < 50


def test_a_loss_that_all_ranks_have_is_printed_though_another_rank_raises_right_after(tmp_path: Path) -> None:
    """Rank 1 had read the loss and raised before rank 0 had looked at the end of the step: rank 0's last line was lost,
    where one process prints it."""
    script = tmp_path / "script.py"
    slow = """
from farspan.execute.step.end import StepEnd
wait, ended = StepEnd.wait, []
def wait_late(self):
    ended.append(self)
    if rank == 0 and len(ended) == 2:
        threading.Event().wait(3.0)
    return wait(self)
StepEnd.wait = wait_late
"""
    script.write_text(
        f"import threading\n{TRAINS}{slow}print(train())\nprint(train())\n"
        "if rank == 1:\n    raise KeyError('e')\ntrain()"
    )
    finished = run_processes(2, script, environment={"FARSPAN_DEADLINE": "20"})
    assert [each.code for each in finished] == [1, 1]
    assert "KeyError" in finished[1].stderr and "RemoteError: rank 1 failed" in finished[0].stderr
    assert finished[0].stdout == finished[1].stdout and len(finished[0].stdout.split()) == 2
