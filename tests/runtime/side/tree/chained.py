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
from farspan.runtime.side.tree import numbers

numbers.FAN_OUT = 1
RANK = int(os.environ.get("RANK", "0"))
STORY = sys.argv[1] if int(os.environ.get("WORLD_SIZE", "1")) - 2 == RANK else ""

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
    if number == 1 and STORY == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 1 and STORY == "raises":
        raise ValueError("the loader is empty")
    optimizer.step()
    losses.append(loss.item())
print(json.dumps([losses, model[2].weight.tolist() if RANK in (0, 2) else None]))
