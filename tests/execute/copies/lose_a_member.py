"""A script for `farspan run`: `lose_a_member.py FOLDER PLAN [RANK STEP MOMENT ...]`; those ranks are killed then.

Each rank that is left leaves what it has found. `train` is the same program in one process.

    before, recorded, stepped, evaluated    between two lines of the program
    forward      in the middle of a step, in the forward of a module
    brought      others have copies of what it had after the step, and nobody knows that all have
    committed    right after the step; rank 1 does not know yet that all have completed it
"""

from __future__ import annotations

import json
import os
import posix
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

NUM_STEPS = 7
MICRO_BATCHES = 4

in_forward: list[Callable[[], None]] = []


class Dying(nn.Module):
    """May kill its rank when it runs for real."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) in (torch.Tensor, nn.Parameter):
            for act in in_forward:
                act()
        return torch.tanh(x)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), Dying())
    return nn.Sequential(first, nn.Dropout(0.2), nn.Linear(16, 16), Dying(), nn.Linear(16, 4))


def train(model: nn.Module, moment: Callable[[int, str], None], optimizer_name: str) -> dict[str, Any]:
    kind = getattr(torch.optim, optimizer_name)
    optimizer = kind(model.parameters(), lr=0.01, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    losses: list[float] = []
    read: list[Any] = []
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        moment(step, "before")
        loss = torch.zeros(())
        for _ in range(MICRO_BATCHES):
            x, y = torch.randn(6, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator)
            loss = F.cross_entropy(model(x), y) / MICRO_BATCHES
            loss.backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        moment(step, "recorded")
        optimizer.step()
        moment(step, "stepped")
        schedule.step()
        losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            logits = model(torch.randn(3, 8, generator=generator))
            total = logits.sum().item()
            moment(step, "evaluated")
            read += [total, logits.tolist(), next(model.parameters())[0].tolist()]
        model.train()
        print("step", step, flush=True)
    moments = [kept for _, kept in sorted(optimizer.state_dict()["state"].items())]
    tensors = [*model.state_dict().values(), *(item for kept in moments for _, item in sorted(kept.items()))]
    state = [item.tolist() for item in tensors if isinstance(item, torch.Tensor)]
    return {"losses": losses, "read": read, "state": state}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_when_brought(engine: Any) -> None:
    """Lets others have their copies, and dies before this rank says that it has its own."""
    answer, contribute = engine.values.copies, engine.side.contribute

    def copies(*names: Any) -> Any:
        threading.Timer(0.3, die).start()
        return answer(*names)

    def contribute_not(key: str, *args: Any, **kwargs: Any) -> None:
        if key.startswith("operation "):
            threading.Event().wait()
        contribute(key, *args, **kwargs)

    engine.values.copies, engine.side.contribute = copies, contribute_not


def hear_late(engine: Any) -> None:
    """Lets this rank hear of a loss before it hears that all have completed the next operation."""
    side = engine.side
    gathered = side.gathered

    def gathered_late(key: str, deadline_s: float) -> Any:
        found = gathered(key, deadline_s)
        if key.startswith("operation "):
            side.gathered = gathered
            side.contribute("what never comes", b"")
            gathered("what never comes", deadline_s)
        return found

    side.gathered = gathered_late


def main(folder: str, plan: str, optimizer_name: str, *kills: str) -> None:
    import farspan
    from farspan.execute.process.world import current_engine

    rank = int(os.environ["FARSPAN_RANK"])
    is_first_start = os.environ.get("FARSPAN_RESTART", "0") == "0"
    due = [(int(who), int(at), which) for who, at, which in zip(*[iter(kills)] * 3, strict=True) if is_first_start]
    model = farspan.distribute(build(), plan=json.loads(plan))

    def moment(step: int, name: str) -> None:
        mine = [which for who, at, which in due if (who, at) == (rank, step)]
        if name in mine or (name == "stepped" and "committed" in mine):
            die()
        if name == "recorded" and "forward" in mine:
            in_forward.append(die)
        if name == "recorded" and "brought" in mine:
            die_when_brought(current_engine())
        if name == "recorded" and rank == 1 and any((at, which) == (step, "committed") for _, at, which in due):
            hear_late(current_engine())

    found = train(model, moment, optimizer_name)
    found |= {"rank": farspan.rank(), "stages": list(farspan.plan_of(model).stages)}
    number = posix.open(f"{folder}/rank{rank}", posix.O_WRONLY | posix.O_CREAT)  # on every rank the disk's
    posix.write(number, json.dumps(found).encode())
    posix.close(number)


if __name__ == "__main__":
    main(*sys.argv[1:])
