"""A script that every rank runs: `fail_in_groups.py NUM_GROUPS WHAT`; the last rank of all does what is named."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import farspan

NUM_STEPS = 4


class Gate(nn.Module):
    """Lets nothing through that is too large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu" and x.detach().abs().max() > 1e6:
            raise ValueError("too large")
        return x.clone()


def main(num_groups: int, what: str) -> None:
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    if what == "other number" and is_last:
        num_groups = 1
    if what == "other model" and is_last:
        model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))
    if what == "raise in a step":
        model = nn.Sequential(Gate(), *model)
    model = farspan.distribute(model, data_parallel=num_groups)
    is_last_group = farspan.data_rank() == num_groups - 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        x = torch.randn(3, 8) + (0 if what == "same batches" else farspan.data_rank())
        if step == 2 and is_last_group and what == "raise in a step":
            x = 1e9 * x
        if step == 2 and is_last:
            if what == "raise":
                raise ValueError("no more data")
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if what == "differ":
                x = model[0](x)[:, :8]
        if step == 2 and is_last_group and what == "fewer steps":
            break
        if step == 2 and is_last_group and what == "other rate":
            optimizer.param_groups[0]["lr"] = 0.05
        optimizer.zero_grad()
        if not (step == 2 and is_last_group and what == "no backward"):
            F.cross_entropy(model(x), torch.zeros(3, dtype=torch.long)).backward()
        if what == "read alone" and step == 2:
            farspan.flush()
            if is_last:
                print(model[2].weight.grad.sum().item())
        try:
            optimizer.step()
        except ValueError:
            print("caught")
        if what == "other weights" and is_last_group and step == 1:
            with torch.no_grad():
                model[2].bias += 1
    print("over")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
