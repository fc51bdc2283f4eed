"""A script that every rank runs: `fail_sharded.py WHAT`; two groups of one rank, which do not do the same."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

import farspan


def main(what: str) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    kind: Any = "optimizer"
    if what == "other shard" and farspan.rank() == 1:
        kind = None
    model = farspan.distribute(model, data_parallel=2, shard=kind)
    is_last_group = farspan.data_rank() == 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), 0.1 * (step + farspan.data_rank()))).square().mean().backward()
        if what == "other rate" and is_last_group and step == 1:
            optimizer.param_groups[0]["lr"] = 0.05
        if what == "another gradient" and is_last_group and step == 1:
            model[2].weight.grad.mul_(2)
        optimizer.step()
        if what == "steps alone" and is_last_group and step == 1:
            optimizer.step()
        if what == "loads alone" and is_last_group and step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
        if what == "a hook alone" and is_last_group and step == 1:
            optimizer.register_step_pre_hook(lambda *_: None)
    print("over")


if __name__ == "__main__":
    main(sys.argv[1])
