"""Loops whose ranks differ, each for a cause of its own: the first argument says which."""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import farspan

RANK, STORY = int(os.environ["RANK"]), sys.argv[1]
FOLDER = sys.argv[2] if len(sys.argv) > 2 else ""
X, Y = torch.linspace(-1.0, 1.0, 48).reshape(6, 8), torch.tensor([0, 1, 2, 0, 1, 2])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.heads = nn.ModuleDict({name: nn.Linear(8, 3) for name in ("left", "right")})

    def forward(self, x: Tensor, names: Any = ("left",)) -> Tensor:
        hidden = self.body(x)
        return sum(self.heads[name](hidden) for name in names)  # type: ignore[return-value]


def batches() -> list[Tensor]:
    found = [X + number for number in range(3)]
    if STORY == "data" and RANK == 1:
        found.reverse()
    return found


torch.manual_seed(0)
model: Any = farspan.distribute(Net(), plan={"body": 0, "heads": 1}, measure=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, batch in enumerate(batches()):
    if STORY == "loader":
        optimizer.zero_grad()
    if STORY == "branch" and RANK == 0:
        result = model(batch * 2)  # here: branch
    elif STORY == "order":
        result = model(batch, ("left", "right") if RANK == 0 else ("right", "left"))
    else:
        result = model(batch)  # here: training
    loss = F.cross_entropy(result, Y)
    loss.backward()
    if STORY == "often" and RANK == 0 and number == 1:
        continue
    if number == 1 and RANK == 1 and STORY == "unstepped":
        break
    optimizer.step()  # here: step
    if number == 1 and RANK == 1 and STORY == "break":
        break
    if number == 1 and RANK == 1 and STORY == "exit":
        sys.exit(0)  # here: exit
    if STORY == "early" and farspan.rank() == 0:
        farspan.save(FOLDER, model=model, step=number)  # here: early
    if STORY != "clear" or farspan.rank() == 0:
        optimizer.zero_grad()  # here: clear
    if STORY == "evaluation" and farspan.rank() == 0:
        with torch.no_grad():
            print(model(X[:4]).argmax(-1).tolist())  # here: evaluation
    if STORY == "loader" and farspan.rank() == 0:
        for item in DataLoader(TensorDataset(X), batch_size=3):
            print(model(item[0]).argmax(-1).tolist())  # here: loader
    if STORY == "save" and farspan.rank() == 0:
        farspan.save(FOLDER, model=model)  # here: save
    if STORY == "restore":
        farspan.save(FOLDER, model=model, step=number)
        if farspan.rank() == 0:
            farspan.load(FOLDER, model=model)  # here: restore
    if STORY == "load":
        if farspan.rank() == 0:
            model.load_state_dict({name: torch.zeros_like(item) for name, item in model.state_dict().items()})
        torch.randn(2)
    if STORY == "passes" and (farspan.rank() == 0 or number != 1):
        list(DataLoader(TensorDataset(X)))  # here: passes
if STORY == "end" and farspan.rank() == 0:
    print(model(X[:4]).argmax(-1).tolist())  # here: end
if STORY == "saved" and farspan.rank() == 0:
    farspan.save(FOLDER, model=model)  # here: saved
if STORY == "copied" and farspan.rank() == 0:
    copy.deepcopy(model)  # here: copied
