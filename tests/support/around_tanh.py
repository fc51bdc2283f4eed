"""Models of four layers whose second one does more than it computes, and a loop of two steps that trains them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Tanh", "built", "train"]


class Tanh(nn.Module):
    """What the second layer computes, whatever else it does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def train(model: Any) -> list[float]:
    """Returns the losses of two steps of two micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(1)
    found: list[float] = []
    for _ in range(2):
        optimizer.zero_grad()
        losses = []
        for _ in range(2):
            loss = model(torch.randn(4, 4, generator=generator)).square().mean()
            loss.backward()
            losses.append(loss)
        optimizer.step()
        found += [loss.item() for loss in losses]
    return found


def built(kind: type[Tanh]) -> nn.Sequential:
    """The same for each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 4), nn.Linear(4, 4))
