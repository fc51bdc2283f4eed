"""Losses with arguments that torch does not pass on to function modes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan

l1_loss: Any = F.l1_loss  # torch's types do not know its weight


class _Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        out = self.second(self.first(x).tanh())
        return out, l1_loss(out, y, weight=w)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_l1_loss_has_its_weights(num_ranks: int) -> None:
    """In the loop, in the model, and of tensors that have nothing to do with it."""
    torch.manual_seed(0)
    model = _Inside()
    x, y, w = torch.randn(5, 4), torch.randn(5, 3), torch.rand(5, 3)

    def train(each: nn.Module) -> list[Any]:
        out, loss = each(x, y, w)
        (loss + l1_loss(out, y, reduction="sum", weight=w)).backward()
        gradients = [item.grad.tolist() for item in each.parameters() if item.grad is not None]
        return [loss.item(), l1_loss(y, x[:, :3], weight=w).item(), *gradients]

    expected = train(copy.deepcopy(model))

    def program(rank: int) -> list[Any]:
        own = copy.deepcopy(model)
        farspan.distribute(own)
        return train(own)

    assert all(found == expected for found in run_threads(num_ranks, program))
