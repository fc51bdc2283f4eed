"""The program that loses members of a wide stage, and the same in one process.

    train_wide.py farspan FOLDER PIPE PLAN    every rank of `farspan run --keep-going`; says where it is
    train_wide.py plain FOLDER                torch alone, in one process

Each leaves its losses, what it has read while it evaluated, and its final state.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[2] / "src")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from benchmarks.recovery.words import say  # noqa: E402
from torch import nn  # noqa: E402

NUM_STEPS = 150
PAUSE_S = 0.03
MICRO_BATCHES = 6
WIDTH = 32
EVALUATED_EVERY = 5


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 8))


def evaluated(model: nn.Module, generator: torch.Generator) -> list[float]:
    """What the program reads between two steps: results, and a parameter."""
    model.eval()
    found: list[float] = []
    with torch.no_grad():
        for _ in range(2):
            found += model(torch.randn(4, WIDTH, generator=generator)).flatten().tolist()
        found += [parameter.norm().item() for parameter in model.parameters()][:3]
        found += next(model.parameters()).flatten()[:4].tolist()
    model.train()
    return found


def train(model: nn.Module, after_step: Callable[[int], None]) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    losses: list[float] = []
    read: list[float] = []
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        total = 0.0
        for _ in range(MICRO_BATCHES):
            x, y = torch.randn(6, WIDTH, generator=generator), torch.randint(0, 8, (6,), generator=generator)
            loss = F.cross_entropy(model(x), y) / MICRO_BATCHES
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(total))
        if step % EVALUATED_EVERY == 0:
            read += evaluated(model, generator)
        after_step(step)
    moments = [kept for _, kept in sorted(optimizer.state_dict()["state"].items())]
    tensors = [*model.state_dict().values(), *(tensor for kept in moments for _, tensor in sorted(kept.items()))]
    return {"losses": losses, "read": read, "state": [tensor.tolist() for tensor in tensors]}


def with_farspan(folder: Path, pipe: str, plan: str) -> None:
    import farspan
    from farspan.execute.process.world import current_engine

    rank = int(os.environ["FARSPAN_RANK"])
    model = farspan.distribute(build(), plan=json.loads(plan))
    engine: Any = current_engine()

    def after_step(step: int) -> None:
        say(pipe, "step", rank, step, engine.num_ranks, time.monotonic())
        time.sleep(PAUSE_S)

    found = train(model, after_step)
    (folder / f"found{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "farspan":
        say(sys.argv[3], "pid", os.environ["FARSPAN_RANK"], os.getpid())
        with_farspan(Path(sys.argv[2]), *sys.argv[3:5])
    else:
        (Path(sys.argv[2]) / "plain.json").write_text(json.dumps(train(build(), lambda step: None)))
