"""What the program does to gradients before a backward comes before that backward adds to them, in every order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.plainly import X, assert_same_as_plainly
from torch import nn

from farspan.program.tasks import BackwardWork, ForwardWork, StepWork, scheduled
from farspan.schedule import Kind


def test_a_backward_needs_the_forwards_that_use_the_gradient_it_adds_to() -> None:
    """The forward that writes is of another segment, which nothing else keeps before the backward."""
    forwards = [ForwardWork(0, 0, 0, (), (), holds=True, keeps=True) for _ in range(2)]
    forwards[1] = forwards[1]._replace(gradients=(7,))
    backward = BackwardWork(
        rank=0, micro_batch=0, level=0, forward=0, uses=(), accumulates=(3, 7), frees=True,
        is_worth_splitting=False, feeds_another_rank=False,
    )  # fmt: skip
    for accumulates, needs in (((3, 7), (0, 1)), ((3,), (0,))):
        work = StepWork(tuple(forwards), (backward._replace(accumulates=accumulates),))
        tasks = scheduled(work, "1f1b", 1, 0).schedule.tasks
        assert [task.needs for task in tasks if task.kind is Kind.BACKWARD] == [needs]


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_gradients_that_are_cleared_in_place_are_those_of_one_process(
    seed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARSPAN_SANITIZE", seed)

    def program(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
        found: list[float] = []
        for _ in range(4):
            for shift in range(2):
                model(X + shift).square().mean().backward()
            found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
            optimizer.step()
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)
        return found, [p.tolist() for p in model.parameters()]

    assert_same_as_plainly(lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), program, 2)
