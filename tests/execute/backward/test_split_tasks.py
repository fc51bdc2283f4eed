"""Weight gradients as tasks of their own: which backwards leave them, when they run, and that memory follows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.execute.process.world import current_engine

WIDTH = 32


def chain(num_layers: int) -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(num_layers) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def kinds_of_a_step(num_ranks: int, *, schedule: str, least_s: float | None = None, num_micro_batches: int = 4) -> Any:
    """The tasks that each rank runs in its second step, as "F0 B0 W0"."""
    torch.manual_seed(0)
    models = [chain(2 * num_ranks) for _ in range(num_ranks)]
    plan = farspan.Plan(
        stages=tuple(f"rank:{rank}" for rank in range(num_ranks)),
        placement={str(number): number // 4 for number in range(0, 4 * num_ranks, 2)},
        schedule=schedule,
    )

    def program(rank: int) -> str:
        model = farspan.distribute(models[rank], plan=plan)
        engine = current_engine()
        assert engine is not None
        if least_s is not None:
            engine.least_weight_work_s = least_s
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            for number in range(num_micro_batches):
                model(torch.full((3, WIDTH), float(number))).square().mean().backward()
            optimizer.step()
        traces = engine.executor.traces
        return " ".join(f"{trace.kind}{trace.micro_batch}" for trace in traces if trace.kind != "wait")

    return run_threads(num_ranks, program)


def test_a_rank_that_another_waits_for_puts_weight_gradients_off() -> None:
    assert kinds_of_a_step(3, schedule="zero-bubble") == kinds_of_a_step(3, schedule="auto", least_s=-math.inf)
    assert kinds_of_a_step(3, schedule="zero-bubble") == [
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 F2 B0 F3 B1 W0 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 F3 B3 W0 W1 W2 W3",
    ]


def test_where_that_is_enough_only_the_last_micro_batches_are_split() -> None:
    assert kinds_of_a_step(2, schedule="auto", num_micro_batches=6, least_s=-math.inf) == [
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 W4 W5",
    ]


@pytest.mark.parametrize("schedule", ["auto", "1f1b"])
def test_nothing_is_split_where_it_does_not_pay_or_the_plan_forbids_it(schedule: str) -> None:
    first = {"auto": "F0 F1 F2 F3 B0 B1 B2 B3", "1f1b": "F0 F1 F2 B0 F3 B1 B2 B3"}[schedule]  # auto runs ahead
    second = {"auto": "F0 F1 F2 B0 F3 B1 B2 B3", "1f1b": "F0 F1 B0 F2 B1 F3 B2 B3"}[schedule]
    assert kinds_of_a_step(3, schedule=schedule) == [first, second, "F0 B0 F1 B1 F2 B2 F3 B3"]


def test_gpipe_runs_all_forwards_first() -> None:
    assert kinds_of_a_step(3, schedule="gpipe") == ["F0 F1 F2 F3 B0 B1 B2 B3"] * 3


class Sometimes(nn.Module):
    """A parameter that a node without a rule uses in some micro-batches, beside one with a rule in all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, scale: bool) -> torch.Tensor:
        x = torch.tanh(nn.functional.linear(x, self.weight))
        return x * self.weight[0] if scale else x


class Alternating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = Sometimes()

    def forward(self, x: torch.Tensor, scale: bool) -> torch.Tensor:
        return self.last(self.first(x), scale)


class Wandering(nn.Module):
    """A module called twice in a row in some micro-batches, before and after another rank's in the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, is_apart: bool) -> torch.Tensor:
        for part in (self.last, self.first, self.last) if is_apart else (self.first, self.last, self.last):
            x = torch.tanh(part(x))
        return x


@pytest.mark.parametrize("schedule", ["auto", "zero-bubble"])
@pytest.mark.parametrize("make", [Alternating, Wandering])
def test_micro_batches_add_up_in_order_where_only_some_can_wait(make: Callable[[], nn.Module], schedule: str) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(7, WIDTH) for _ in range(5)]

    def train(model: nn.Module) -> list[torch.Tensor]:
        for number, x in enumerate(batches):
            loss = model(x, number % 2 == 1).square().mean() * 10**number  # so that another order gives another sum
            loss.backward()
        gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
        return [gradient.read() if hasattr(gradient, "read") else gradient for gradient in gradients]

    models = [make() for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    wanted = train(models[2])

    def program(rank: int) -> tuple[list[torch.Tensor], str]:
        model = farspan.distribute(models[rank], plan={"first": "rank:0", "last": "rank:1"})
        engine = current_engine()
        assert engine is not None
        engine.schedule, engine.least_weight_work_s = schedule, -math.inf
        found = train(model)
        steps = [trace for trace in engine.executor.traces if trace.kind != "wait"]
        return found, " ".join(f"{trace.kind}{trace.micro_batch}" for trace in steps)

    results = run_threads(2, program)
    assert "W3" in results[1][1]
    for found, _ in results:
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
