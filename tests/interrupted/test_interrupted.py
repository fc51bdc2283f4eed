"""Promises for a program that catches what its model raises: the same exception on every rank, and training goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.interrupted import state
from tests.interrupted.loops import MICRO_BATCHES, PAD, build, found_by
from tests.support.ranks import run_processes, run_threads

import farspan
from farspan.errors import RecordError

SCRIPT = Path(__file__).with_name("loops.py")


@pytest.mark.parametrize(
    ("num_ranks", "environment"),
    [(2, {"FARSPAN_SAME_HOST": "0"}), (3, {"FARSPAN_MEASURE": "0"})],
)
def test_same_as_the_plain_loop(num_ranks: int, environment: dict[str, str]) -> None:
    finished = run_processes(num_ranks, SCRIPT, environment=environment)
    assert [process.stderr for process in finished if process.code] == []
    for process in finished:
        assert json.loads(process.stdout.splitlines()[-1]) == {}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_a_module_has_done_before_it_raises_is_done(num_ranks: int) -> None:
    finished = run_processes(num_ranks, SCRIPT.with_name("state.py"))
    assert [process.stderr for process in finished if process.code] == []
    for process in finished:
        assert json.loads(process.stdout.splitlines()[-1]) == {}


@pytest.mark.parametrize("name", state.LOOPS)
def test_what_a_module_has_done_before_it_raises_is_done_on_one_rank(name: str) -> None:
    wanted = state.found_by(name, lambda model: model)
    assert repr(state.found_by(name, farspan.distribute)) == repr(wanted)


@pytest.mark.parametrize("name", ["forward, twice in a row", "accumulation"])
def test_same_on_one_rank(name: str) -> None:
    wanted = found_by(name, lambda model: model)
    assert repr(found_by(name, lambda model: farspan.distribute(model))) == repr(wanted)


def test_what_comes_behind_an_exception_cannot_be_read() -> None:
    models = [build(3, "runtime") for _ in range(2)]

    def program(rank: int) -> list[str]:
        model = farspan.distribute(models[rank])
        x, more = torch.ones(MICRO_BATCHES, 8, 6), torch.zeros(MICRO_BATCHES, 8, 6)
        for _ in range(3):
            [model(*part).sum().backward() for part in zip(x, more, strict=True)]
            farspan.flush()
        more[1] = PAD
        losses = [model(*part).sum() for part in zip(x, more, strict=True)]
        for loss in losses:
            loss.backward()
        found: list[str] = []
        for act in (farspan.flush, losses[0].item, losses[1].item, losses[2].item, losses[3].backward, farspan.flush):
            try:
                act()
                found.append("")
            except (RuntimeError, RecordError) as error:
                found.append(f"{type(error).__name__}: {error}".splitlines()[0])
        return found

    first, second = run_threads(2, program)
    assert first == second
    assert first[0] == "RuntimeError: ('more than 50', 50)"
    assert [text.partition(":")[0] for text in first[1:]] == ["", "RecordError", "RecordError", "", "RecordError"]
    assert "has not been computed" in first[2]


def test_gradients_are_lost_where_a_later_backward_has_run() -> None:
    """An exception in the backward of a micro-batch, on the first stage: the last one is ahead of it."""
    models = [build(0, "backward") for _ in range(3)]

    def program(rank: int) -> tuple[list[bool], list[bool]]:
        model = farspan.distribute(models[rank], schedule="1f1b")
        x, more = torch.ones(MICRO_BATCHES, 8, 6), torch.zeros(MICRO_BATCHES, 8, 6)
        model(x[0], more[0]).sum().backward()  # the first one through code of the program's runs at once
        model.zero_grad()
        more[0] = PAD
        [model(*part).sum().backward() for part in zip(x, more, strict=True)]
        with pytest.raises(ArithmeticError):
            farspan.flush()
        lost = [item.grad is not None and bool(item.grad.isnan().all()) for item in model.parameters()]
        model.zero_grad(set_to_none=False)
        return lost, [item.grad is not None and bool(item.grad.isnan().any()) for item in model.parameters()]

    results = run_threads(3, program)
    assert results[0] == results[1] == results[2]
    assert any(results[0][0]) and not any(results[0][1])


UNCAUGHT = """
import torch
from torch import nn
import farspan

class Guard(nn.Module):
    def __init__(self):
        super().__init__()
        self.take = nn.Linear(4, 4)
    def forward(self, x):
        if x.abs().max() > 50:
            raise ValueError("too large")
        return self.take(x)

torch.manual_seed(0)
model = farspan.distribute(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Guard(), nn.Linear(4, 4)), PLAN)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    for number in range(4):
        model(torch.full((3, 4), 1e6 if (step, number) == (3, 1) else 0.0)).sum().backward()
    optimizer.step()
"""


def test_uncaught_it_ends_all_ranks_with_one_traceback(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNCAUGHT.replace("PLAN", 'plan={"0": 0, "1": 0, "2": 1, "3": 1}'))
    first, second = run_processes(2, script)
    assert (first.code, second.code) == (1, 1)
    what, why, hint = first.stderr.splitlines()[-3:]
    assert what == "RemoteError: rank 1 failed: ValueError: too large"
    assert why.startswith("  why  farspan: raised in 2 (Guard) at ")
    assert hint == "  try  rank 1's log has its full traceback"
    assert "Traceback" not in first.stderr
    assert second.stderr.count("ValueError: too large") == 1 and "raise ValueError" in second.stderr
