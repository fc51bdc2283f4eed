"""Two groups of two stages of two ranks each: prints how far a group is from what one process finds for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from tests.data_axis.lockstep import Found, GroupCase, difference, in_groups, in_one_process
from tests.support.models import GPT
from torch import nn

import farspan

LAST = dict.fromkeys(["blocks.1", "norm", "head"], "rank:2&rank:3")


def build() -> nn.Module:
    return GPT(blocks=2).double()


def train(model: Any, group: int, found: Found) -> Iterator[None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    words = torch.randint(17, (2, 6), generator=torch.Generator().manual_seed(group))
    for step in range(3):
        optimizer.zero_grad()
        losses: list[Any] = []
        for number in range(2):
            ids = (words + number + step) % 17
            losses.append(F.cross_entropy(model(ids).view(-1, 17), ids.roll(-1, 1).view(-1)) / 2)
            losses[-1].backward()
        yield
        optimizer.step()
        found.update({f"loss {step} {number}": loss for number, loss in enumerate(losses)})


if __name__ == "__main__":
    case = GroupCase(build, train, {"*": "rank:0&rank:1", **LAST})
    found = in_groups(case, 2)
    group = farspan.data_rank()
    print("off by", difference(found, in_one_process(case, 2)[group]))
