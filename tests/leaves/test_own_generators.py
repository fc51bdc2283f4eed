"""Modules that draw from a generator of torch's that the program holds as well: it moves on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.plainly import X, assert_same_as_plainly, train
from torch import Tensor, nn


class Noisy(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.held = {"generator": generator}

    def draw(self, x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=self.held["generator"])

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x + 0.1 * self.draw(x)


class Masked(Noisy):
    """What it draws depends on what is recorded."""

    def draw(self, x: Tensor) -> Tensor:
        generator = self.held["generator"]
        kept = torch.bernoulli(torch.sigmoid(x).detach(), generator=generator)
        kept *= torch.empty_like(x).bernoulli_(0.5, generator=generator)
        return kept + torch.multinomial(x.detach().abs() + 1, 1, generator=generator)


class ByData(Noisy):
    """Whether it draws depends on data."""

    def draw(self, x: Tensor) -> Tensor:
        return super().draw(x) if x.abs().mean() > 0.01 else x


class Shared(nn.Module):
    """Modules of several ranks and the loop draw from one generator in turn."""

    def __init__(self, part: Callable[[torch.Generator], nn.Module]) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)
        self.first, self.middle, self.last = (part(self.generator) for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.middle(self.first(x))))


def program(model: Any) -> Any:
    seen: list[Any] = []
    for _ in range(2):
        seen += train(model, X + torch.rand(8, generator=model.generator))
    return seen, model.generator.get_state().tolist()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("part", [Noisy, Masked, ByData])
def test_every_rank_moves_a_generator_that_modules_hold(
    part: Callable[[torch.Generator], nn.Module], num_ranks: int
) -> None:
    places = {"first": 0, "middle": min(1, num_ranks - 1), "last": num_ranks - 1, "head": 0}
    plan = {name: f"rank:{rank}" for name, rank in places.items()}
    assert_same_as_plainly(lambda: Shared(part), program, num_ranks, plan=plan)
