"""A script that every rank runs: `fail_in_teams.py WHAT`; the last rank does what is named, in its third step."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import farspan

NUM_STEPS = 4


class Gate(torch.autograd.Function):
    """Lets gradient through, and raises in the backward once `is_closed` is set."""

    is_closed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        if Gate.is_closed and not gradients[0].is_meta and gradients[0].abs().sum() > 0:
            raise ValueError("no gradient here")
        return gradients[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(12, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 12)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        return self.head(x + self.b(Gate.apply(torch.tanh(self.a(x)))))


def main(what: str) -> None:
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    torch.manual_seed(0)
    model: Any = farspan.distribute(Net(), tensor_parallel=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        words = torch.randint(12, (3, 5))
        if step == 2 and is_last:
            if what == "raise":
                raise ValueError("no more data")
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if what == "another shape":
                words = words[:, :4]
            if what == "another operation":
                model.a.forward = lambda x: F.relu(F.linear(x, model.a.weight, model.a.bias))
        Gate.is_closed = step == 2 and what == "raise in the backward"  # on whichever rank runs it
        optimizer.zero_grad()
        F.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
        optimizer.step()
    print("over")


if __name__ == "__main__":
    main(*sys.argv[1:])
