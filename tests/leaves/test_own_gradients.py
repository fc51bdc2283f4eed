"""Modules that look at, or change, gradients of their own parameters while they are called.

They see those of all micro-batches before, whose backwards have then run.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.plainly import assert_same_as_plainly, train
from torch import Tensor, nn


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.eye(8))

    def before(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.before(x) @ self.weight))


class Clears(Layer):
    def before(self, x: Tensor) -> Tensor:
        self.weight.grad = None
        return x


class Deletes(Layer):
    def before(self, x: Tensor) -> Tensor:
        del self.weight.grad
        return x


class ClearsAll(Layer):
    def before(self, x: Tensor) -> Tensor:
        self.zero_grad()
        return x


class ClearsItsPart(Layer):
    def before(self, x: Tensor) -> Tensor:
        self.linear.weight.grad = None
        return x


class Halves(Layer):
    def before(self, x: Tensor) -> Tensor:
        if self.weight.grad is not None:
            self.weight.grad.mul_(0.5)
        return x


class Clips(Layer):
    def before(self, x: Tensor) -> Tensor:
        nn.utils.clip_grad_norm_(self.parameters(), 0.01)
        return x


class AddsItsNorm(Layer):
    def before(self, x: Tensor) -> Tensor:
        return x if self.weight.grad is None else x + self.weight.grad.norm()


class CountsThem(Layer):
    def before(self, x: Tensor) -> Tensor:
        return x * (1 + sum(item.grad is not None for item in self.parameters()))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("part", [Clears, Deletes, ClearsAll, ClearsItsPart, Halves, Clips, AddsItsNorm, CountsThem])
def test_a_forward_sees_the_gradients_that_the_plain_loop_has(part: Callable[[], nn.Module], num_ranks: int) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), part(), nn.Linear(8, 5))

    assert_same_as_plainly(build, train, num_ranks)
