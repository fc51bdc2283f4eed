"""How fast a checkpoint is written and read, beside the disk itself and torch.distributed.checkpoint, in turns.

raw        the same bytes, in one file, in writes of 16 MiB, and fsync; read into new memory
farspan    farspan.save(wait=True), farspan.load: model and AdamW, verified
dcp        torch.distributed.checkpoint.save and load of the same tensors

What is read has been dropped from the system's cache before. Then farspan.save without waiting: how long it keeps the
program, in the call and when the next step of the optimizer waits for what is still being copied, beside how long the
save takes; and what training steps lose while it is written.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.common import arguments, finish  # noqa: E402

import farspan  # noqa: E402
from farspan.comm.tensor_bytes import buffer_of  # noqa: E402
from farspan.state.saving.saver import Saved  # noqa: E402

RAW_BAR, DCP_BAR, BLOCKED_BAR = 0.8, 1.0, 0.05
BLOCK_BYTES = 16 * 2**20
WIDTH = 1024


def build(size_mib: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its AdamW that has stepped: so many MiB together."""
    num_layers = max(1, round(size_mib / 3 / (WIDTH * (WIDTH + 1) * 4 / 2**20)))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One step; how long it took."""
    return sum(timed_step(model, optimizer))


def timed_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float, float]:
    """One step: how long forward and backward took, how long the optimizer waited for its state, and its step."""
    began = time.perf_counter()
    model(torch.ones(4, WIDTH)).sum().backward()
    asked = time.perf_counter()
    _ = optimizer.state
    given = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad()
    return asked - began, given - asked, time.perf_counter() - given


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {name: item.detach() for name, item in model.named_parameters()}
    for name, item in model.named_parameters():
        found |= {f"{name}/{key}": value for key, value in optimizer.state[item].items()}
    return found


def drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def timed(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


class Sides:
    """The three ways, each with a folder of its own."""

    def __init__(self, folder: Path, size_mib: int) -> None:
        self.folder = folder
        self.model, self.optimizer = build(size_mib)
        self.size_bytes = sum(item.nbytes for item in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is saved; a program that trains does not hold it beside its optimizer."""
        return tensors_of(self.model, self.optimizer)

    def save_raw(self) -> None:
        self.folder.joinpath("raw").mkdir()
        file = os.open(self.folder / "raw" / "file", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        for item in self.tensors().values():
            data = buffer_of(item)
            for begin in range(0, len(data), BLOCK_BYTES):
                os.write(file, data[begin : begin + BLOCK_BYTES])
        os.fsync(file)
        os.close(file)

    def load_raw(self) -> None:
        memory = memoryview(np.empty(self.size_bytes, dtype=np.uint8).data)
        file, done = os.open(self.folder / "raw" / "file", os.O_RDONLY), 0
        while count := os.readv(file, [memory[done : done + BLOCK_BYTES]]):
            done += count
        os.close(file)
        assert done == self.size_bytes

    def save_farspan(self) -> None:
        farspan.save(self.folder / "farspan", model=self.model, optimizer=self.optimizer, step=1, wait=True)

    def load_farspan(self) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        farspan.load(self.folder / "farspan", model=self.model, optimizer=optimizer)

    def save_dcp(self) -> None:
        dcp.save(self.tensors(), checkpoint_id=str(self.folder / "dcp"))

    def load_dcp(self) -> None:
        fresh = {name: torch.empty_like(item) for name, item in self.tensors().items()}
        dcp.load(fresh, checkpoint_id=str(self.folder / "dcp"))

    def turn(self, order: list[str]) -> dict[str, float]:
        """All once; seconds."""
        found: dict[str, float] = {}
        for name in order:
            shutil.rmtree(self.folder / name, ignore_errors=True)
            os.sync()
            found[f"save {name}"] = timed(getattr(self, f"save_{name}"))
        for name in order:
            drop_from_cache(self.folder / name)
            found[f"load {name}"] = timed(getattr(self, f"load_{name}"))
        return found

    def asynchronous(self, turn: int) -> dict[str, float]:
        """A save that nobody waits for at once; seconds."""
        steps = [train(self.model, self.optimizer) for _ in range(3)]
        os.sync()
        total = timed(lambda: self.save_asynchronously(turn).wait())
        began = time.perf_counter()
        saved = self.save_asynchronously(turn)
        called = time.perf_counter() - began
        first = timed_step(self.model, self.optimizer)
        saved.wait()
        found = {"call": called, "wait of the step": first[1], "total": total}
        return found | {"step": median(steps), "first step after": sum(first)}

    def save_asynchronously(self, turn: int) -> Saved:
        return farspan.save(self.folder / "asynchronous", model=self.model, optimizer=self.optimizer, step=turn, keep=1)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--size", type=int, default=512, help="MiB")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", help="where to write; a temporary one by default")
    args = parser.parse_args()
    size_mib, turns = (64, 3) if args.quick else (args.size, args.turns)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # dcp warns that there is one process
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        sides = Sides(Path(folder), size_mib)
        names = ["raw", "farspan", "dcp"]
        for turn in range(turns + 1):
            row = sides.turn(names[turn % 3 :] + names[: turn % 3]) | sides.asynchronous(turn)
            if turn:  # the first one warms up
                rows.append(row)
                print("  ".join(f"{name} {value:.3f}" for name, value in row.items()), flush=True)

    def ratio(kind: str, other: str) -> float:
        return median([row[f"{kind} {other}"] / row[f"{kind} farspan"] for row in rows])

    speeds = {(kind, other): ratio(kind, other) for kind in ("save", "load") for other in ("raw", "dcp")}
    blocked = median([(row["call"] + row["wait of the step"]) / row["total"] for row in rows])
    slowed = median([(row["first step after"] - row["step"]) / row["total"] for row in rows])
    figure = (
        f"save {speeds['save', 'raw']:.2f} of raw, {speeds['save', 'dcp']:.2f} of DCP; "
        f"load {speeds['load', 'raw']:.2f} of raw, {speeds['load', 'dcp']:.2f} of DCP; "
        f"blocked {blocked:.1%} of a save (bars: {RAW_BAR}, {DCP_BAR}, {BLOCKED_BAR:.0%}); the step after it "
        f"takes {slowed:.1%} of a save longer"
    )
    holds = blocked <= BLOCKED_BAR and all(
        speed >= (RAW_BAR if other == "raw" else DCP_BAR) for (_, other), speed in speeds.items()
    )
    finish(args, rows=rows, figure=figure, holds=holds)


if __name__ == "__main__":
    main()
