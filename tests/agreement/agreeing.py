"""Programs whose ranks do the same, or not quite, for the processes of tests/promises/test_agreement_processes.py.

The first argument says which; each prints what it saw on its last line, as JSON.
"""

from __future__ import annotations

import enum
import json
import os
import random
import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import farspan

RANK = int(os.environ.get("RANK", "0"))
X = torch.randn(6, 12, generator=torch.Generator().manual_seed(3))
MODELS: list[nn.Module] = []
Y = torch.randint(5, (6,), generator=torch.Generator().manual_seed(4))


class Mode(enum.Enum):
    FAST = 1


class Chosen(nn.Module):
    """Is given sets, enums, objects and arrays besides its tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor, names: Any, extras: Any) -> tuple[torch.Tensor, frozenset[str]]:
        return self.linear(x) * (1 + 0.1 * len(names)), frozenset(names)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Chosen()
        self.middle, self.drop = nn.Linear(12, 12), nn.Dropout(0.1)
        self.last = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extras = {"mode": Mode.FAST, "kinds": {int, str}, "table": np.arange(3), "rate": 0.1, "function": F.relu}
        y, names = self.first(x, {"left", "right", "upper", "lower"}, extras)
        return self.last(self.drop(self.middle(y)) * len(names))


def net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Net()


def train(draw: Any, num_steps: int = 4) -> list[float]:
    """Let rank 1 call `draw` between the second step and the third."""
    model = farspan.distribute(net())
    MODELS.append(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[float] = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 1 and RANK == 1:
            draw()
    return losses


def with_own_generators() -> None:
    torch.rand(3, generator=torch.Generator().manual_seed(1))
    random.Random(3).random()
    np.random.default_rng(3).random()


def leave_out_last_step() -> list[float]:
    """Rank 1 clears the gradients at the end, and rank 0 does not."""
    losses = train(lambda: None, num_steps=1)
    if RANK == 1:
        MODELS[-1].zero_grad()
    return losses


STORIES: dict[str, Any] = {
    "nothing": lambda: None,
    "own": with_own_generators,
    "torch": lambda: torch.randn(2),
    "random": lambda: random.random(),
    "numpy": lambda: np.random.rand(),
    "seed": lambda: torch.manual_seed(5),
}

if __name__ == "__main__":
    story = sys.argv[1]
    print(json.dumps(leave_out_last_step() if story == "end" else train(STORIES[story])))
