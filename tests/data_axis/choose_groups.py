"""A script that every rank runs: data_parallel="auto"; it prints the number of groups, and the weights after a step."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import farspan


def main() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    farspan.distribute(model, data_parallel="auto")
    other = farspan.distribute(nn.Linear(4, 2), data_parallel="auto")  # as many as there are
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))[farspan.data_rank() :: farspan.data_world()]
    F.mse_loss(model(x), other(x)).backward()
    optimizer.step()
    print(json.dumps([farspan.data_world(), model[0].weight.flatten().tolist()]))


if __name__ == "__main__":
    main()
