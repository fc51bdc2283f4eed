"""A program that gives a module a new function for each step does not keep all of them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import torch
from tests.support.loop import on_ranks
from torch import Tensor, nn

import farspan


class Held:
    """Something that a function knows."""


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rate: Callable[[], float] = lambda: 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.rate()


def rate_of(step: int, held: Held) -> Callable[[], float]:
    return lambda: 1.0 + step if held else 0.0


def test_functions_of_steps_that_are_over_are_not_kept() -> None:
    def program(model: nn.Module) -> int:
        farspan.distribute(model)
        part, optimizer = model[0], torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[index]
        seen = list[weakref.ref[Held]]()
        for step in range(600):
            held = Held()
            seen.append(weakref.ref(held))
            part.rate = rate_of(step, held)  # type: ignore[assignment]
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        gc.collect()
        return sum(each() is not None for each in seen)

    (num_left,) = on_ranks(1, program, lambda: nn.Sequential(Part(), nn.Linear(4, 2)))
    assert num_left < 450  # predictions of the latest calls hold some of them
