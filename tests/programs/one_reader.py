"""Rank 0 alone reads, through a loader that shuffles; alone in its world it trains plainly. Prints what came out."""

from __future__ import annotations

import json
import os
import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import farspan

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Numbers(Dataset[dict[str, Tensor]]):
    """Nobody but rank 0 may read it."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        assert RANK == 0
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(8, generator=generator) + random.random() * 0.1
        return {"x": x, "y": torch.randint(5, (), generator=generator), "number": torch.tensor(number)}


class Net(nn.Module):
    """Calls its layers in the order it is given, and adds noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, order: list[int], noise: Tensor) -> Tensor:
        for number in order:
            x = torch.tanh(self.layers[number](x)) + x
        return self.head(x + 0.1 * noise)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    model = Net()
    if WORLD_SIZE > 1:
        plan = {f"layers.{number}": f"rank:{number % 2}" for number in range(4)} | {"head": "rank:1"}
        farspan.distribute(model, plan=plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    result: list[object] = []
    for _ in range(2):
        loader = iter(DataLoader(Numbers(), batch_size=4, shuffle=True)) if RANK == 0 else None
        for _ in range(3):
            batch = farspan.from_rank(0, next(loader) if loader else None)
            optimizer.zero_grad()
            order = torch.randperm(4).tolist()[: 2 + int(random.random() * 3)]  # by the program's own generators
            loss = F.cross_entropy(model(batch["x"], order, torch.randn(batch["x"].shape)), batch["y"])
            loss.backward()
            optimizer.step()
            result.append([loss.item(), batch["number"].tolist()])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
