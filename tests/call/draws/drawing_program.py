"""One rank, or the plain program: a loop that draws everywhere, and prints all it has found."""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import farspan

IS_PLAIN = "plainly" in sys.argv


class Block(nn.Module):
    """A leaf: Python decides whether it is left out, numpy by how much it is scaled, torch what is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 0.3:
            return x
        x = x * (1 + 0.1 * float(np.random.randn()))
        return x + self.drop(self.b(self.drop(torch.tanh(self.a(x)))))


class Net(nn.Module):
    """A container: leaves layers out, and adds noise of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x), 0.2, self.training) + torch.randn(3)[0] * 0.01
        for block in self.blocks:
            if torch.rand(()).item() < 0.8:
                x = block(x)
        return self.head(x + random.random() * 0.01)


def main() -> list[Any]:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = Net()
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if not IS_PLAIN:
        names = ("first", "blocks.0", "blocks.1", "blocks.2", "head")
        farspan.distribute(model, plan={name: f"rank:{number % num_ranks}" for number, name in enumerate(names)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(torch.randn(12, 8)), batch_size=4, shuffle=True)
    found: list[Any] = []
    for epoch in range(2):
        for number, (x,) in enumerate(loader):
            optimizer.zero_grad()
            losses = [model(x + 0.1 * torch.randn_like(x)).square().mean()]
            losses[0].backward()
            with torch.random.fork_rng():
                torch.manual_seed(number)
                losses.append(model(x).square().mean())
            saved = torch.get_rng_state()
            losses.append(model(x).abs().mean())
            torch.set_rng_state(saved)
            losses.append(model(x).abs().mean())
            sum(losses[1:]).backward()  # type: ignore[union-attr]
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.01)
            optimizer.step()
            found += [loss.item() for loss in losses]
        if epoch == 0:
            torch.manual_seed(5)
        model.eval()
        with torch.no_grad():
            found.append(torch.multinomial(F.softmax(model(torch.ones(2, 8)), dim=-1), 2).tolist())
        model.train()
    nn.init.normal_(model.head.weight)
    found.append(sum(parameter.detach().double().sum().item() for parameter in model.parameters()))
    return [*found, torch.get_rng_state().tolist(), torch.rand(1).item(), random.random(), float(np.random.rand())]


if __name__ == "__main__":
    print(json.dumps(main()))
