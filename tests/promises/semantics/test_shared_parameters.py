"""A parameter that several modules hold gets the gradient of one process, whichever of them are called and use it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.plainly import assert_same_as_plainly, train
from torch import Tensor, nn


class Box(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.box, self.mix = Box(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.box(self.mix(x))
        return x


class CallsAPartOfAPart(nn.Module):
    """A module, and beside it a part of it, in a later segment."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.decoder, self.last = nn.Linear(8, 8), Decoder(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.decoder(self.first(x)))
        return self.first(self.decoder.box(x))


class Biased(nn.Module):
    def __init__(self, bias: nn.Linear, *, uses_it: bool) -> None:
        super().__init__()
        self.linear, self.bias, self.uses_it = nn.Linear(8, 8), bias, uses_it

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.tanh(y + self.bias(x) if self.uses_it else y)


class HoldsWhatItDoesNotUse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        bias = nn.Linear(8, 8, bias=False)
        self.first = Biased(bias, uses_it=False)
        self.second = Biased(bias, uses_it=True)
        self.third = Biased(bias, uses_it=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)))


class Depends(nn.Module):
    """What it gives can only be known by running it, which ends a micro-batch's first part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1.0 if x.detach().sum().item() > 0 else 0.5)


class UsesItBetweenWhatDependsOnData(nn.Module):
    """Three modules with one weight, on three ranks, in three parts of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.second.weight = self.third.weight = self.first.weight
        self.between = nn.ModuleList([Depends() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.between[0](self.first(x)))
        return self.third(self.between[1](x))


def test_same_numbers_where_each_use_is_in_a_part_of_its_own() -> None:
    plan = {"first": "rank:0", "between.0": "rank:0", "second": "rank:1", "between.1": "rank:1", "third": "rank:2"}
    assert_same_as_plainly(UsesItBetweenWhatDependsOnData, train, 3, plan=plan)


@pytest.mark.parametrize(
    ("build", "plan"),
    [
        (CallsAPartOfAPart, {"first": "rank:0", "last": "rank:0", "decoder": "rank:1"}),
        (CallsAPartOfAPart, {"first": "rank:1", "last": "rank:1", "decoder": "rank:0"}),
        (HoldsWhatItDoesNotUse, {"first": "rank:0", "second": "rank:1", "third": "rank:0"}),
        (HoldsWhatItDoesNotUse, {"first": "rank:1", "second": "rank:0", "third": "rank:1"}),
    ],
)
def test_same_numbers_as_one_process(build: Any, plan: Any) -> None:
    assert_same_as_plainly(build, train, 2, plan=plan)
