"""`torch.autograd.grad` gives None for what its backward does not reach, also where only the backward shows it."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.plainly import X, Y, assert_same_as_plainly
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Same(torch.autograd.Function):
    """Autograd's graph does not show what is behind it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class OneTrained(nn.Module):
    """Of its two layers one is called without gradient."""

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.trained, self.other, self.is_checkpointed = nn.Linear(8, 8), nn.Linear(8, 8), is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            beside = self.other(x)
        run = (lambda y: checkpoint(self.trained, y, use_reentrant=False)) if self.is_checkpointed else self.trained
        return Same.apply(run(x)) + beside


def program(model: Any) -> Any:
    """The optimizer keeps nothing for what has no gradient, and what it keeps is saved and loaded."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen: list[Any] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        parameters = list(model.parameters())
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        seen.append((loss.item(), [gradient is None for gradient in found], len(optimizer.state)))
    return seen, [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_parameter_that_a_backward_of_python_code_does_not_reach_has_no_gradient(is_checkpointed: bool) -> None:
    plan = {"0": "rank:0", "1": "rank:1", "2": "rank:0"}
    parts = functools.partial(OneTrained, is_checkpointed)
    assert_same_as_plainly(lambda: nn.Sequential(nn.Linear(8, 8), parts(), nn.Linear(8, 5)), program, 2, plan=plan)
