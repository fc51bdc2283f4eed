"""Mistakes made on purpose, each in a function of its own: how Python shows what they raise, on each rank.

The line at fault ends in a comment, `# here: NAME`; where there is a module around it, `# here: NAME, in MODULE`.
"""

from __future__ import annotations

import gc
import json
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import farspan

__all__ = ["X", "Y", "Net", "distributed", "run_all", "train"]

X, Y = torch.linspace(-1.0, 1.0, 48).reshape(6, 8), torch.tensor([0, 1, 2, 0, 1, 2])


class Net(nn.Module):
    """A right layer on rank 0, a wrong one on rank 1, a right one there: rank 0 hears of what that does."""

    def __init__(self, bad: nn.Module, *, is_first: bool = False) -> None:
        super().__init__()
        first, last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.first, self.bad = (bad, first) if is_first else (first, bad)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.bad(self.first(x)))


def distributed(model: nn.Module, plan: Any = None) -> Any:
    """Returns the model, over two ranks; in one process as it is."""
    if os.environ["WORLD_SIZE"] == "1":
        return model
    return farspan.distribute(model, measure=False, plan=plan or {"first": 0, "bad": 1, "last": 1})


def train(model: nn.Module, *, plan: Any = None, num_steps: int = 1) -> None:
    """Distribute a model, and train it as anybody would."""
    model = distributed(model, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
        loss.item()


def run_all(mistakes: Mapping[str, Callable[[], None]]) -> None:
    """Make each mistake; print what is raised, a line of JSON for each."""
    for name, make in mistakes.items():
        try:
            make()
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            shown: Any = {"name": name, "type": type(error).__name__, "message": str(error), "text": text}
        else:
            shown = {"name": name, "type": "", "message": "", "text": ""}
        print(json.dumps(shown), flush=True)
        gc.collect()  # the ends of workers, which may come at any time, are not what this is about
