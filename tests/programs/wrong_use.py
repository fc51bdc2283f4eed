"""Programs that go wrong, each in its own way; the first argument says which, the second under which schedule."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import farspan

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Fragile(nn.Module):
    """Raises, or dies, where it is told to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(8, 8)

    @property
    def armed(self) -> bool:
        """By what nobody can foresee: it happens when the call runs."""
        return os.environ.get("ARMED") == "1"

    def forward(self, x: Tensor) -> Tensor:
        if self.armed and self.how == "raises_in_forward":
            raise ValueError("the fragile module broke in forward")
        if self.armed and self.how == "is_killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.armed and self.how == "is_stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        y = self.linear(x)
        if self.armed and self.how == "raises_in_backward":
            y.register_hook(break_backward)
        return y


def break_backward(_: Tensor) -> None:
    raise ValueError("the fragile module broke in backward")


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = Fragile(how)
        self.third = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = self.third(torch.tanh(self.second(x)))
        return self.last(x)


HALVES = {
    "first": "rank:0",
    "second": f"rank:{WORLD_SIZE - 1}",
    "third": f"rank:{WORLD_SIZE // 2}",
    "last": f"rank:{WORLD_SIZE - 1}",
}
PLANS: dict[str, Any] = {
    "unknown_name": {"first": "rank:0", "secnod": "rank:1", "third": "rank:1", "last": "rank:1"},
    "nobody_owns": {"first": "rank:0", "second": "rank:1"},
    "no_such_rank": {**HALVES, "last": "rank:7"},
    "too_many_ranks": {"first": "rank:0", "second": "rank:0", "third": "rank:1", "last": "rank:1"},
    "other_plans": {**HALVES, "third": f"rank:{RANK}"},
}


def main(how: str, schedule: str | None = None) -> None:
    torch.manual_seed(0)
    model = Net(how)
    farspan.distribute(model, plan=PLANS.get(how, HALVES), schedule=schedule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        os.environ["ARMED"] = "1" if step == 2 and WORLD_SIZE - 1 == RANK else "0"
        optimizer.zero_grad()
        for number in range(4):
            x = torch.randn(3, 8)
            if how == "diverges" and step == 2 and number == 1 and RANK == 1:
                x = F.relu(model.first(x))
            out = model(x)
            if how == "cannot_be_recorded" and step == 2:
                torch.vmap(torch.sum)(out)
            if how == "raises_in_user_code" and step == 2 and RANK == 0:
                raise KeyError("a bug in the user's own loop")
            loss = F.cross_entropy(out, torch.zeros(3, dtype=torch.long)) / 4
            loss.backward()
            if how == "reads_alone" and step == 2 and RANK == 0:
                print(loss.item())
        if how == "ends_early" and step == 2 and RANK == 1:
            return
        optimizer.step()
        print("step", step, loss.item(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
