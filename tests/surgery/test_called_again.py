"""A container that turns out to need second derivatives is called once more, as one unit: it draws no numbers twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.plainly import X, assert_same_as_plainly
from torch import Tensor, nn


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
