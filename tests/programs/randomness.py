"""One rank: trains a model that draws; prints the losses, and what the program's own generators give afterwards."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import farspan

__all__ = ["train"]


class Block(nn.Module):
    """Draws in its layers, in its own code, again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[assignment]
        with torch.random.fork_rng():
            torch.manual_seed(3)
            noise = torch.randn(8)  # the same every time, because it says so
        return self.b(x + noise) * (torch.rand(8) < 0.8)

    def inner(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.drop(self.a(x))))


class Whole(nn.Module):
    """A leaf wherever it is: Python's generators are its rank's own business."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * (1 + 0 * random.random() + 0 * float(np.random.rand()))


def seed_all() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def draw_all() -> list[Any]:
    return [torch.rand(2).tolist(), random.random(), float(np.random.rand())]


def train(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Whole())
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    names = ("0.a", "0.b", "1.a", "1.b", "2")  # on two ranks, no block is whole
    farspan.distribute(model, plan={name: f"rank:{number % num_ranks}" for number, name in enumerate(names)}, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, 8)
    seed_all()
    losses: list[float] = []
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            loss = F.dropout(model(x), 0.1).square().mean()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    after = draw_all()
    seed_all()
    return {"losses": losses, "after": after, "plainly": draw_all()}


if __name__ == "__main__":
    print(json.dumps(train(0)))
