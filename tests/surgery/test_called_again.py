"""A container that turns out to need second derivatives is called once more, as one unit: it draws no numbers twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.plainly import X, assert_same_as_plainly
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
from farspan.call.leaf import WholeError


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.3), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Penalty(nn.Module):
    """That of WGAN-GP, which draws a point between the real and the fake before it takes derivatives."""

    def __init__(self, critic: Critic) -> None:
        super().__init__()
        self.critic = critic

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        share = torch.rand(real.shape[0], 1)
        quality = self.critic(fake).mean()
        between = (share * real + (1 - share) * fake).requires_grad_(True)
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        return ((slope.norm(2, dim=1) - 1) ** 2).mean() + quality


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(3, 8), Critic()
        self.penalty = Penalty(self.critic)


def train(model: Any) -> Any:
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.critic.parameters(), 0.1)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            fake = model.generator(torch.randn(6, 3))
            loss = model.critic(X).mean() + model.penalty(X, fake.detach())
            loss.backward()
        optimizer.step()
        seen.append((loss.item(), torch.rand(1).item()))
    return seen, [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_gradient_penalty_draws_once(num_ranks: int) -> None:
    assert_same_as_plainly(Gan, train, num_ranks)


class Counting(Penalty):
    """Counts its calls, and keeps what it has drawn; the first calls need no derivatives."""

    def __init__(self, critic: Critic) -> None:
        super().__init__(critic)
        self.number, self.log, self.seen = 0, [], {"shares": torch.zeros(())}

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        self.number += 1
        self.log.append(self.number)
        if self.number <= 4:
            return self.critic(fake).mean()
        self.seen["shares"] = self.seen["shares"] + torch.rand(()).detach()
        self.latest = real.mean().item()
        return super().forward(real, fake)


class CountingGan(Gan):
    def __init__(self) -> None:
        super().__init__()
        self.penalty = Counting(self.critic)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_the_first_attempt_has_changed_is_put_back(num_ranks: int) -> None:
    def train_and_look(model: Any) -> Any:
        result = train(model)
        penalty = model.penalty
        return result, penalty.number, penalty.log, penalty.seen["shares"].item(), penalty.latest

    assert_same_as_plainly(CountingGan, train_and_look, num_ranks)


def second_derivatives(critic: nn.Module, x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return slope.square().mean()


class Late(nn.Module):
    """Asks for them by a function of its own, in its fifth call."""

    def __init__(self, critic: Critic) -> None:
        super().__init__()
        self.critic, self.number = critic, 0

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        self.number += 1
        if self.number < 5:
            return self.critic(real).mean()
        return second_derivatives(self.critic, real.clone().requires_grad_(True))


class LateGan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(3, 8), Critic()
        self.penalty = Late(self.critic)


def test_what_cannot_be_put_back_is_an_error() -> None:
    def program(model: Any) -> bool:
        for _ in range(4):
            model.penalty(X, X)
        with pytest.raises(WholeError, match="as one unit only, and has been called part by part before"):
            model.penalty(X, X)
        return True

    models = [LateGan(), LateGan()]
    assert run_threads(2, lambda rank: program(farspan.distribute(models[rank]))) == [True, True]
