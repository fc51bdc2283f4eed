"""A training over ranks of which each passes on for the next: `chained.py STORY`, which the last rank but one obeys."""

from __future__ import annotations

import json
import os
import signal
import sys

import torch
import torch.nn.functional as F
from torch import nn

import farspan
from farspan.control.tree import numbers

RANK = int(os.environ.get("RANK", "0"))
NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def main(story: str) -> None:
    numbers.FAN_OUT = 1
    torch.manual_seed(2)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    farspan.distribute(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    for number in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if number == 1 and story == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 1 and story == "raises":
            raise ValueError("the loader is empty")
        optimizer.step()
        losses.append(loss.item())
    print(json.dumps([losses, list(model.parameters())[4].tolist() if RANK in (0, 2) else None]))


if __name__ == "__main__":
    main(sys.argv[1] if RANK == NUM_RANKS - 2 else "")
