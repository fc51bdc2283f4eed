"""A training program that is resumed from its latest checkpoint, and saves in each step: run by every rank.

Dropout, batch statistics, a shuffled loader whose items are noisy (torch, `random`, numpy), AdamW with two groups, a
learning rate that follows a schedule, gradient accumulation.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import farspan
from farspan.execute.process.world import engine_of_this_thread
from farspan.state.counts import counts_to_json, restore_counts
from farspan.state.generators import generators_from_json, generators_to_json

__all__ = ["CONTROLS", "run"]

CONTROLS = ("generators", "optimizer", "data position", "buffers", "scheduler", "counts of calls")
"""What a control leaves out when it resumes."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.relu(self.norm(self.linear(x))))


class Net(nn.Module):
    """A residual perceptron whose first and last layers share a weight."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(width))
        self.leave = nn.Linear(width, width)
        self.leave.weight = self.enter.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x * self.scale)


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, width: int = 16) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(56, width, generator=generator)
        self.y = torch.randint(0, width, (56,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(self.x.shape[1]) + random.random() + np.random.rand()
        return self.x[index] + 0.1 * noise, self.y[index]


def run(
    folder: Path,
    num_steps: int,
    *,
    seed: int | None,
    workers: int = 0,
    control: str = "",
    memory: bool = False,
    on_step: Callable[[int], None] = lambda step: None,
) -> dict[str, Any]:
    """Train from the latest checkpoint, if there is one, to the end.

    Args:
        folder: Of the checkpoints.
        num_steps: When it ends.
        seed: Of `distribute`.
        workers: Of the loader.
        control: What is put back to what it was before it was loaded.
        memory: Whether it saves into memory.
        on_step: Called after each step.

    Returns:
        All losses, and a digest of the final state.
    """
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = farspan.distribute(Net(), seed=seed, measure=False)
    named = list(model.named_parameters())
    groups = [
        {"params": [item for name, item in named if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [item for name, item in named if not name.endswith("weight")], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    loader = farspan.resumable(DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=workers))
    step, losses = 0, list[float]()
    if farspan.latest(folder):
        step, losses = _resume(folder, model, optimizer, scheduler, loader, control)
    while step < num_steps:
        for x, y in loader:
            optimizer.zero_grad()
            total = 0.0
            for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
                loss = nn.functional.cross_entropy(model(part_x), part_y) / 2
                loss.backward()
                total += loss.item()
            optimizer.step()
            scheduler.step()
            step += 1
            losses.append(total)
            given: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            farspan.save(folder, **given, step=step, extra={"losses": losses}, keep=2, memory=memory)
            on_step(step)
            if step == num_steps:
                break
    return {"losses": losses, "state": _digest(model, optimizer, scheduler)}


def _resume(
    folder: Path, model: nn.Module, optimizer: Any, scheduler: Any, loader: Any, control: str
) -> tuple[int, list[float]]:
    engine = engine_of_this_thread(None)
    generators = generators_to_json(engine.recorder.draws.generator)
    place, counts = json.loads(json.dumps(loader.to_json(1))), counts_to_json(engine)
    buffers = {name: item.clone() for name, item in model.state_dict().items() if "running" in name}
    given = {} if control == "optimizer" else {"optimizer": optimizer}
    given |= {} if control == "scheduler" else {"scheduler": scheduler}
    loaded = farspan.load(folder, model=model, **given)
    if control == "generators":
        generators_from_json(engine.recorder.draws.generator, generators, "a control")
    elif control == "data position":
        loader.from_json(place, 1, "a control")
    elif control == "counts of calls":
        restore_counts(engine, counts, "a control")
    elif control == "buffers":
        model.load_state_dict(model.state_dict() | buffers)
    return loaded.step, loaded.extra["losses"]


def _digest(model: nn.Module, optimizer: Any, scheduler: Any) -> str:
    digest = hashlib.sha256()
    for name, item in model.state_dict().items():
        digest.update(name.encode() + item.contiguous().numpy().tobytes())
    state = optimizer.state_dict()
    for number, kept in state["state"].items():
        digest.update(str(number).encode())
        for key, item in kept.items():
            digest.update(key.encode() + item.contiguous().numpy().tobytes())
    rest = [state["param_groups"], scheduler.state_dict()["last_epoch"], random.random(), float(np.random.rand())]
    digest.update(json.dumps([*rest, torch.rand(()).item()]).encode())
    return digest.hexdigest()
