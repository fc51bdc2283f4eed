"""Writes into tensors that are detached keep their gradient; `Variable` and scripted functions see recorded tensors."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.support.plainly import assert_same_as_plainly, train
from torch import Tensor, nn
from torch.autograd import Variable

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)

    @torch.jit.script
    def softplus(x: Tensor) -> Tensor:
        return torch.log1p(torch.exp(x))


def detached(x: Tensor) -> Tensor:
    return x.new(6, 5).zero_().detach()


def data(x: Tensor) -> Tensor:
    return x.data.new(6, 5).zero_().data


def variable(x: Tensor) -> Tensor:
    return Variable(x.data.new(6, 5).zero_())


class Sums(nn.Module):
    """Adds up what it computes in memory that begins without gradient, as attention over time does."""

    def __init__(self, begin: Any, *, by_views: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.ones(5))
        self.begin, self.by_views = begin, by_views

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        total, step = self.begin(y), self.second(y)
        total += step
        sums = total * 2
        if self.by_views:
            row = total.view(-1)
            total[0].add_(step[1])
            total[:, 1] += step[:, 2]
            sums = sums * row.view(6, 5).mean()
        total += step.tanh()
        return sums * total * softplus(self.scale)


@pytest.mark.parametrize("by_views", [False, True])
@pytest.mark.parametrize("begin", [detached, data, variable])
def test_what_is_written_into_a_detached_tensor_keeps_its_gradient(begin: Any, by_views: bool) -> None:
    plan = {"first": 0, "second": 1, "scale": 0}
    assert_same_as_plainly(lambda: Sums(begin, by_views=by_views), train, 2, plan=plan)
