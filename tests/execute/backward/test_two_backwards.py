"""Two backwards through one segment: the first keeps its graph, and the last one, which releases, is ready first."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
from tests.support.plainly import X, assert_same_as_plainly
from torch import Tensor, nn

import farspan


class Net(nn.Module):
    """What is computed at rank 1 has no parameters, which would keep the backwards in order; and much comes after it
    for the first backward, nothing for the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.back, self.more = nn.Linear(8, 8), nn.Linear(8, 8)
        self.is_plain = True

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.first(x)
        with contextlib.nullcontext() if self.is_plain else farspan.on("rank:1"):
            y = torch.tanh(y)
        return y, self.more(self.back(self.last(y.square()))), self.middle(x)


def train(model: Any) -> list[Any]:
    model.is_plain = threading.current_thread() is threading.main_thread()  # ranks have threads of their own
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for shift in range(2):
            y, z, other = model(X + shift)
            z.square().mean().backward(retain_graph=True)
            (y.square().mean() + other.mean()).backward()
        optimizer.step()
    return [parameter.tolist() for parameter in model.parameters()]


def test_backwards_through_one_segment_keep_their_order() -> None:
    plan = {"first": "rank:0", "middle": "rank:1", "last": "rank:2", "back": "rank:0", "more": "rank:2"}
    assert_same_as_plainly(Net, train, 3, plan=plan)
