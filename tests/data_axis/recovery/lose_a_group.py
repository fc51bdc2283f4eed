"""A script for `farspan run`: `lose_a_group.py FOLDER NUM_GROUPS [RANK STEP MOMENT ...]`; those ranks are killed then.

The first rank of each group leaves its losses, its final state and what `farspan.data_rank()` was, by the number that
the group had at the start. `train` is the same program in one process, given who takes part when.
"""

from __future__ import annotations

import json
import os
import posix
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

NUM_STEPS = 6
MICRO_BATCHES = 2


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def batches(step: int, group: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1000 * step + group)
    return [
        (torch.randn(6, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator))
        for _ in range(MICRO_BATCHES)
    ]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y) / MICRO_BATCHES


def train(groups_at: Callable[[int], list[int]]) -> tuple[dict[int, list[float]], list[Any]]:
    """The losses of each group, and the final state.

    Args:
        groups_at: The groups whose gradients are averaged in a step; batch statistics are the first one's.
    """
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: dict[int, list[float]] = {}
    for step in range(NUM_STEPS):
        groups = groups_at(step)
        buffers = [buffer.clone() for buffer in model.buffers()]
        after: list[torch.Tensor] = []
        sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for group in groups:
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
            optimizer.zero_grad()
            for x, y in batches(step, group):
                loss = loss_of(model, x, y)
                loss.backward()
            losses.setdefault(group, []).append(loss.item())
            after = after or [buffer.clone() for buffer in model.buffers()]
            for total, parameter in zip(sums, model.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad * (1 / len(groups))
        for buffer, first in zip(model.buffers(), after, strict=True):
            buffer.copy_(first)
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = total
        optimizer.step()
    return losses, state_of(model, optimizer)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    moments = [kept for _, kept in sorted(optimizer.state_dict()["state"].items())]
    tensors = [*model.state_dict().values(), *(tensor for kept in moments for _, tensor in sorted(kept.items()))]
    return [tensor.tolist() for tensor in tensors]


def main(folder: str, num_groups: int, *kills: str) -> None:
    import farspan

    rank = int(os.environ["FARSPAN_RANK"])
    is_first_start = os.environ.get("FARSPAN_RESTART", "0") == "0"
    moments = {(int(at), moment) for who, at, moment in zip(*[iter(kills)] * 3, strict=True) if int(who) == rank}

    def may_die(step: int, moment: str) -> None:
        if (step, moment) in moments and is_first_start:
            os.kill(os.getpid(), signal.SIGKILL)

    model = farspan.distribute(build(), data_parallel=num_groups)
    group = farspan.data_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[float] = []
    places: list[list[int]] = []
    journal = open(f"{folder}/journal", "w", buffering=1)  # noqa: SIM115 - as scripts do
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        may_die(step, "before")
        for x, y in batches(step, group):
            loss = loss_of(model, x, y)
            loss.backward()
        farspan.flush()
        may_die(step, "computed")
        optimizer.step()
        may_die(step, "after")
        losses.append(loss.item())
        places.append([farspan.data_rank(), farspan.data_world()])
        print("step", step, flush=True)
        print(step, group, file=journal)
    state = state_of(model, optimizer)
    if farspan.rank() == 0:
        result = json.dumps({"losses": losses, "places": places, "state": state})
        number = posix.open(f"{folder}/group{group}", posix.O_WRONLY | posix.O_CREAT)  # on every rank the disk's
        posix.write(number, result.encode())
        posix.close(number)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
