"""One rank: a step that draws, against the same in one process; prints what differs, by name."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.nn.functional as F
from tests.optimizers.written import Langevin
from tests.support.loop import X, Y, mlp, weights

import farspan


def train(model: Any) -> Any:
    torch.manual_seed(5)
    optimizer = Langevin(model.parameters())
    seen: list[Any] = []
    for shift in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X + shift), Y)
        loss.backward()
        optimizer.step()
        seen += [loss.item(), torch.rand(1).item()]
    return seen, weights(model)


if __name__ == "__main__":
    wanted = train(mlp())
    got = train(farspan.distribute(mlp()))
    print(json.dumps({"draws": "" if got == wanted else f"{got} instead of {wanted}"}))
