"""Every schedule on every shape of pipeline: the plain loop's gradients, to the last bit, and an order of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.errors import PlanError
from farspan.execute.process.world import current_engine
from farspan.schedule import SCHEDULES

WIDTH, NUM_LAYERS, NUM_MICRO_BATCHES = 16, 8, 6
SHAPES: dict[str, Callable[[int], list[int]]] = {
    "straight": lambda num_ranks: list(range(num_ranks)),
    "looped": lambda num_ranks: [*range(num_ranks)] * 2,
    "vee": lambda num_ranks: [*range(num_ranks), *reversed(range(num_ranks))],
}


def layers() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS)]
        return nn.Sequential(*parts)


def plan_for(shape: str, num_ranks: int) -> farspan.Plan:
    ranks = SHAPES[shape](num_ranks)
    return farspan.Plan(
        stages=tuple(f"rank:{rank}" for rank in ranks),
        placement={str(number): number * len(ranks) // NUM_LAYERS for number in range(NUM_LAYERS)},
    )


def gradients_after(model: nn.Module) -> list[torch.Tensor]:
    """Of two rounds of micro-batches that differ in size, so that another order of adding gives other sums."""
    for number in range(2 * NUM_MICRO_BATCHES):
        generator = torch.Generator().manual_seed(number)
        (model(torch.randn(5, WIDTH, generator=generator)).square().mean() * 3.0**number).backward()
        if number == NUM_MICRO_BATCHES - 1:
            farspan.flush()
    found: list[Any] = [parameter.grad for parameter in model.parameters()]
    return [gradient.read() if hasattr(gradient, "read") else gradient for gradient in found]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_are_those_of_the_plain_loop(schedule: str, shape: str, num_ranks: int) -> None:
    wanted = gradients_after(layers())
    models = [layers() for _ in range(num_ranks)]

    def program(rank: int) -> tuple[list[torch.Tensor], str]:
        model = farspan.distribute(models[rank], plan=plan_for(shape, num_ranks), schedule=schedule)
        assert json.loads(farspan.plan_of(model).to_json())["schedule"] == schedule
        found = gradients_after(model)
        engine = current_engine()
        assert engine is not None
        return found, "".join(trace.kind for trace in engine.executor.traces if trace.kind != "wait")

    results = run_threads(num_ranks, program)
    for found, _ in results:
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    orders = [order for _, order in results]
    assert any("W" in order for order in orders) == (schedule == "zero-bubble")
    assert all("BF" not in order for order in orders) == (schedule == "gpipe")


def test_both_turning_points_of_a_v_are_split_where_another_rank_waits_further_up() -> None:
    """On the rank where a V turns, the second stage's backward is needed by the first one's, which others wait for."""
    models = [layers() for _ in range(2)]

    def program(rank: int) -> int:
        model = farspan.distribute(models[rank], plan=plan_for("vee", 2), schedule="zero-bubble")
        gradients_after(model)
        engine = current_engine()
        assert engine is not None
        return len({trace.name for trace in engine.executor.traces if trace.kind == "W"})

    assert run_threads(2, program) == [1, 2]  # of rank 0 the last stage only: for its first one nobody waits


@pytest.mark.parametrize(("schedule", "hint"), [("1F1B", '"1f1b"'), ("zerobubble", '"zero-bubble"'), (3, '"auto"')])
def test_a_schedule_that_does_not_exist_is_said_on_every_rank(schedule: Any, hint: str) -> None:
    models = [layers() for _ in range(2)]

    def program(rank: int) -> PlanError:
        with pytest.raises(PlanError) as caught:
            farspan.distribute(models[rank], schedule=schedule)
        return caught.value

    for error in run_threads(2, program):
        assert "schedule" in error.what
        assert "gpipe" in error.why
        assert hint in error.hint


def test_ranks_that_ask_for_different_schedules_are_told() -> None:
    models = [layers() for _ in range(2)]
    with pytest.raises(farspan.FarspanError, match="plan"):
        run_threads(2, lambda rank: farspan.distribute(models[rank], schedule=SCHEDULES[rank]))
