"""A member of a wide stage that raises, or ends: every rank hears of it, and no gradient is silently incomplete."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.ranks import run_processes, run_threads
from tests.wide.loops import Net, X, Y
from torch import Tensor, nn

import farspan

PLAN = {"blocks": "rank:0+rank:1", "head": "rank:2"}
DIES = """
import os, sys, torch, farspan
from torch import nn

class Layer(nn.Linear):
    def forward(self, x):
        if farspan.rank() == 1 and not torch._C._len_torch_dispatch_stack() and x.max() > 2.5:
            os._exit(7)
        return super().forward(x)

model = farspan.distribute(nn.Sequential(Layer(4, 4), nn.Linear(4, 1)), plan={"": "rank:0+rank:1"})
for number in range(4):
    model(torch.full((2, 4), float(number))).sum().backward()
print(model[0].weight.grad.sum().item())
"""


class _Fails(torch.autograd.Function):
    """The same, whose backward takes no nan."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if gradients[0].isnan().any():
            raise RuntimeError("not a number")
        return gradients[0]


class Choosy(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        if (x > 50).any():
            raise RuntimeError("too large")
        return self.block(_Fails.apply(x))


def train(model: Any, fails_in: str) -> tuple[list[Any], list[Any], list[Any]]:
    """Three steps, of which the second one ends with an exception: losses and words, gradients then, weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    gradients: list[Any] = []
    for step in range(3):
        optimizer.zero_grad()
        try:
            for number in range(5):
                is_bad = step == 1 and number == 3
                x = X + (100 if is_bad and fails_in == "forward" else number)
                loss = F.cross_entropy(model(x), Y) * (torch.nan if is_bad and fails_in == "backward" else 1.0)
                loss.backward()
            optimizer.step()
            found.append(loss.item())
        except RuntimeError as error:
            found.append(str(error))
            gradients = [None if item.grad is None else item.grad.clone() for item in model.parameters()]
            gradients = [None if item is None else torch.tensor(item.tolist()) for item in gradients]
    return found, gradients, [item.tolist() for item in model.parameters()]


@pytest.mark.parametrize("gradient_reduction", ["exact", "sum"])
@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_an_exception_of_a_member_is_raised_on_all_ranks(fails_in: str, gradient_reduction: str) -> None:
    """What came before it is there, or nan: never a part of it."""
    torch.manual_seed(3)
    model = Net().eval()
    model.blocks[1] = Choosy(model.blocks[1])
    wanted, kept, weights = train(copy.deepcopy(model), fails_in)
    models = [copy.deepcopy(model) for _ in range(3)]

    def on_rank(rank: int) -> Any:
        distributed = farspan.distribute(models[rank], plan=PLAN, gradient_reduction=gradient_reduction)
        return train(distributed, fails_in)

    for found, gradients, after in run_threads(3, on_rank):
        assert found[:2] == wanted[:2]
        assert after == weights or gradient_reduction == "sum"
        for gradient, plain in zip(gradients, kept, strict=True):
            assert gradient is not None and plain is not None
            assert torch.allclose(gradient, plain, atol=1e-5) or gradient.isnan().all()
        if fails_in == "forward" and gradient_reduction == "exact":
            assert all(map(torch.equal, gradients, kept)), "those before it have come home"


def test_a_member_that_ends_is_named(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    first, second = run_processes(2, script, environment={"FARSPAN_DEADLINE": "20"})
    assert second.code == 7
    assert first.code == 1 and "rank 1" in first.stderr and first.stdout == ""
