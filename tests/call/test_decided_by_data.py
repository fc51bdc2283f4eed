"""Modules of which data decide what they use: two calls that leave something out say nothing of a third."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
from farspan.errors import RecordError


class Gate(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.f, self.scale = kind, nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.register_buffer("offset", torch.full((), 0.5))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        is_open = b.mean().item() > 0
        if self.kind == "argument":
            return self.f(a) + b if is_open else self.f(a) + self.offset
        if self.kind == "parameter":
            return self.f(a) * self.scale if is_open else self.f(a)
        return self.f(a) if is_open else a


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.gate, self.head = nn.Linear(8, 8), nn.Linear(8, 8), Gate(kind), nn.Linear(8, 5)

    def forward(self, x: Tensor, shift: float) -> Tensor:
        return self.head(self.gate(self.a(x), self.b(x) + shift))


def train(model: Any) -> Any:
    """The gate is shut in the first three steps, and open in each second micro-batch after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for step in range(5):
        optimizer.zero_grad()
        for number in range(2):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + number))
            shift = 9.0 if step > 2 and number else -9.0
            F.cross_entropy(model(x, shift), torch.arange(6) % 5).backward()
        found += [None if item.grad is None else item.grad.tolist() for item in model.parameters()]
        optimizer.step()
    weights = list(model.parameters())
    for shift in (9.0, -9.0):
        gradients = torch.autograd.grad(model(x, shift).sum(), weights, allow_unused=True)
        found += [None if item is None else item.tolist() for item in gradients]
    return found


PLANS: dict[str, Mapping[str, str]] = {
    "stages": {"a": "rank:0", "b": "rank:0", "*": "rank:1"},
    "wide": {"a": "rank:0", "b": "rank:0", "*": "rank:1+rank:0"},
}


def found_by(kind: str, plan: str) -> tuple[Any, list[Any]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net(kind)
    models = [copy.deepcopy(model) for _ in range(2)]
    reduction = "exact" if plan == "wide" else None
    return train(model), run_threads(
        2, lambda rank: train(farspan.distribute(models[rank], plan=PLANS[plan], gradient_reduction=reduction))
    )


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["argument", "parameter"])
def test_same_gradients_as_one_process(kind: str, plan: str) -> None:
    wanted, found = found_by(kind, plan)
    assert None in wanted, "something was left out"
    assert all(item == wanted for item in found)


def test_no_other_argument_is_returned_in_silence() -> None:
    with pytest.raises(RecordError, match=r"returned or wrote into other arguments|foreseen only to pass on"):
        found_by("an argument returned", "stages")
