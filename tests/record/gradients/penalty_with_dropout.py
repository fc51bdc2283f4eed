"""One rank: a gradient penalty on a critic with dropout; prints what differs from the plain program."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import farspan

__all__ = ["dropout", "dropout_after_reads"]


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.3))
        self.second = nn.Sequential(nn.Linear(12, 12), nn.SiLU(), nn.Dropout(0.3))
        self.head = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.second(self.first(x)), 0.2, self.training))


def dropout(*, is_distributed: bool) -> list[Any]:
    """Returns losses, weights, and what the program's generator gives afterwards."""
    return _train(is_distributed=is_distributed, reads=False)


def dropout_after_reads(*, is_distributed: bool) -> list[Any]:
    """The same of a program that reads what it takes the derivative of."""
    return _train(is_distributed=is_distributed, reads=True)


def _train(*, is_distributed: bool, reads: bool) -> list[Any]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = Critic()
    if is_distributed:
        farspan.distribute(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(8, 6).requires_grad_()
            total = model(F.dropout(x, 0.1)).sum()
            losses += [total.item(), torch.rand(1).item()] if reads else []
            (slope,) = torch.autograd.grad(total, x, create_graph=True)
            loss = (slope.norm(2, dim=1) - 1).square().mean() + model(x.detach()).mean()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, [item.tolist() for item in model.state_dict().values()], torch.rand(3).tolist()]


if __name__ == "__main__":
    wanted, found = (globals()[sys.argv[1]](is_distributed=is_distributed) for is_distributed in (False, True))
    differing = {}
    for name, first, second in zip(("losses", "weights", "draws"), wanted, found, strict=True):
        pairs = zip(tree_leaves(first), tree_leaves(second), strict=True)
        worst = max(abs(a - b) for a, b in pairs)
        differing[name] = "" if worst < 1e-12 else f"differ by {worst}"
    print(json.dumps(differing))
