"""`micro_batches="auto"`: the planner chooses the number; and weights that are made of others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.execute.process.console import Console
from farspan.execute.process.world import current_engine

torch.manual_seed(0)
_BUILT = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
_X, _Y = torch.randn(12, 6), torch.arange(12) % 5


def _num_micro_batches() -> int:
    step = farspan.last_step()
    assert step is not None
    return step.num_micro_batches


def _gradients(model: nn.Module) -> list[Any]:
    return [None if item.grad is None else torch.tensor(item.grad.tolist()) for item in model.parameters()]


def test_auto_chooses_the_number_and_the_plan_says_it(tmp_path: Any) -> None:
    """By the work of the first batch, alike on all ranks; the plan, kept in a file, is cut as much in one process."""
    built, x = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]), torch.randn(256, 512)

    def program(rank: int) -> Any:
        model: Any = farspan.distribute(copy.deepcopy(built), micro_batches="auto")
        model(x).square().mean().backward()
        plan = farspan.plan_of(model)
        gradient = model[0].bias.grad.tolist()
        if rank == 0:
            plan.save(tmp_path / "plan.json")
        return plan.micro_batches, _num_micro_batches(), gradient

    found = run_threads(2, program)
    number = found[0][0]
    assert number > 1
    assert [each[:2] for each in found] == [(number, number)] * 2
    assert farspan.Plan.load(tmp_path / "plan.json").micro_batches == number

    def again(rank: int) -> Any:
        plan = farspan.Plan(stages=("rank:0",), placement={"": 0}, micro_batches=number)
        model: Any = farspan.distribute(copy.deepcopy(built), plan=plan, micro_batches="auto")
        model(x).square().mean().backward()
        gradient = model[0].bias.grad.tolist()
        return _num_micro_batches(), gradient

    assert run_threads(1, again) == [(number, found[0][2])]


def test_auto_leaves_little_work_whole() -> None:
    """With the reason."""

    def program(rank: int) -> Any:
        model = farspan.distribute(copy.deepcopy(_BUILT), micro_batches="auto")
        for _ in range(2):
            F.cross_entropy(model(_X), _Y).backward()
        engine = current_engine()
        assert engine is not None
        return farspan.plan_of(model).micro_batches, list(engine.recorder.batches.models[id(model)].reasons)

    for number, reasons in run_threads(2, program):
        assert number == 1
        assert reasons == ["one micro-batch is likely to be about as fast as several"]


def test_fewer_micro_batches_than_asked_for_are_said_once(monkeypatch: Any) -> None:
    said: list[str] = []
    monkeypatch.setattr(Console, "say", lambda self, text: said.append(text))

    def program(rank: int) -> Any:
        model = farspan.distribute(copy.deepcopy(_BUILT), plan={"": 0}, micro_batches=64)
        for num_rows in (10, 8):
            F.cross_entropy(model(_X[:num_rows]), _Y[:num_rows]).backward()

    run_threads(1, program)
    assert [text for text in said if "64" in text] == [
        "a batch of 10 rows is cut into 5 micro-batches, not 64: each has at least 2 rows"
    ]


def test_a_model_with_normalised_weights_is_cut() -> None:
    """What a weight is made of has a gradient that is linear in the weight's: a sum over the rows, too."""
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 5))
    plain = copy.deepcopy(normed)
    F.cross_entropy(plain(_X), _Y).backward()
    expected = _gradients(plain)

    def program(rank: int) -> Any:
        model = farspan.distribute(copy.deepcopy(normed), plan={"": 0}, micro_batches=3)
        F.cross_entropy(model(_X), _Y).backward()
        found = _gradients(model)
        return found, _num_micro_batches()

    ((found, number),) = run_threads(1, program)
    assert number == 3
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))


class Pair(nn.Module):
    """Adds two tensors up, of which one may have no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        x = self.first(x)
        return x if y is None else x + self.second(y)


@pytest.mark.parametrize(
    ("options", "inputs", "may_be_cut"),
    [
        ({}, [torch.zeros(8, 6)], True),
        ({}, [torch.zeros(8, 6), torch.zeros(8, 4)], True),
        ({}, [torch.zeros(2, 6)], False),  # too few rows
        ({}, [torch.zeros(6)], False),  # a vector
        ({}, [torch.zeros(6), torch.zeros(4)], False),  # nothing in common
        ({"micro_batches": "auto"}, [torch.zeros(8, 6)], False),  # one is as fast
        ({"micro_batches": 2}, [torch.zeros(8, 6)], True),
        ({"micro_batches": 2}, [torch.zeros(6)], False),  # has been examined
    ],
)
def test_more_micro_batches_are_worth_trying_where_batches_may_be_cut(
    options: dict[str, Any], inputs: list[torch.Tensor], may_be_cut: bool
) -> None:
    def program(rank: int) -> bool:
        model = farspan.distribute(Pair(), **options)
        for _ in range(2):
            model(*inputs).sum().backward()
        engine = current_engine()
        assert engine is not None
        return engine.console.may_cut()

    assert run_threads(2, program) == [may_be_cut] * 2


def test_what_joins_the_rows_of_a_batch_is_not_a_micro_batch() -> None:
    def program(rank: int) -> int:
        model = farspan.distribute(copy.deepcopy(_BUILT), micro_batches=2)
        for _ in range(2):
            out = model(_X)
            loss = F.relu(1 - torch.cdist(out, out)).mean()
            loss.backward()
            loss.item()
        return _num_micro_batches()

    assert run_threads(2, program) == [2, 2]
