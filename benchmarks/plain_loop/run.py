"""A plain loop with micro_batches= over two ranks, against torch on hand-made micro-batches, and against one process.

The loop has no accumulation: `loss = loss_of(model(x), y); loss.backward(); optimizer.step()`. Three sides take turns
in one launch (the model, the cut and the clock are those of benchmarks/vs_torch_pipelining): farspan, which cuts the
batch into micro-batches itself; torch's 1F1B, which is given as many; and the same loop in plain torch on rank 0 alone.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from benchmarks.common import arguments, finish, run_ranks  # noqa: E402
from benchmarks.vs_torch_pipelining.run import (  # noqa: E402
    LEARNING_RATE,
    NUM_BLOCKS,
    TorchSide,
    batch_of,
    build,
    loss_of,
    spans,
    timed,
    untouched_torch,
)

import farspan  # noqa: E402

BAR_OF_TORCH, BAR_OF_ONE = 1.05, 1.6


class PlainLoop:
    """A loop without accumulation."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self.loss: Any = None

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss = loss_of(self.model(x), y)
        self.loss.backward()
        self.optimizer.step()


class Idle:
    """What the other rank does while one trains alone."""

    def step(self, x: Tensor, y: Tensor) -> None: ...


def distributed(num_micro_batches: int) -> Any:
    half = NUM_BLOCKS // 2
    plan = {"embedding": "rank:0", "position": "rank:0", "norm": "rank:1", "head": "rank:1"}
    plan.update({f"blocks.{i}": f"rank:{i // half}" for i in range(NUM_BLOCKS)})
    return farspan.distribute(build(), plan=plan, micro_batches=num_micro_batches)


def measure(rank: int, num_micro_batches: int, args: Any) -> dict[str, Any]:
    ours: Any = PlainLoop(distributed(num_micro_batches))
    with untouched_torch():
        theirs = TorchSide(rank, num_micro_batches)
        alone: Any = PlainLoop(build()) if rank == 0 else Idle()
    losses: list[tuple[float, float]] = []
    times: dict[str, list[tuple[int, int]]] = {"torch": [], "farspan": [], "alone": []}
    names = [*times]
    for turn in range(args.warm_up + args.turns):
        batches = [batch_of(turn * args.steps + i, num_micro_batches, args.batch) for i in range(args.steps)]
        for name in names[turn % 3 :] + names[: turn % 3]:
            if name == "farspan":
                found = [timed(ours, batch) for batch in batches]
                losses.append((ours.loss.item(), 0.0))
            else:
                with untouched_torch():
                    found = [timed(theirs if name == "torch" else alone, batch) for batch in batches]
            if turn >= args.warm_up:
                times[name] += found
        if rank == 0:
            losses[-1] = (losses[-1][0], alone.loss.item())
    everyone: list[Any] = [None, None]
    with untouched_torch():
        dist.all_gather_object(everyone, {"times": times, "losses": losses})
    span = {name: spans([part["times"][name] for part in everyone]) for name in times}
    medians = {name: median(span[name]) for name in span}
    worst = max(abs(a - b) / b for a, b in everyone[0]["losses"])
    return {
        "num_micro_batches": num_micro_batches,
        **{f"{name}_s": value for name, value in medians.items()},
        "against_torch": medians["farspan"] / medians["torch"],
        "against_one": medians["alone"] / medians["farspan"],
        "loss_difference": worst,
        "steps_s": span,
    }


def worker(args: Any) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    rows = [measure(rank, number, args) for number in args.micro_batches]
    if rank == 0:
        Path(args.worker).write_text(json.dumps(rows))
    dist.barrier()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--turns", type=int, help="turns of each side; 24, or 4 with --quick")
    parser.add_argument("--steps", type=int, default=2, help="steps in a turn")
    parser.add_argument("--warm-up", type=int, default=2, help="turns before")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8], help="of a batch")
    parser.add_argument("--batch", type=int, default=4, help="sequences per micro-batch")
    args = parser.parse_args()
    args.turns = args.turns or (4 if args.quick else 24)
    if args.worker:
        worker(args)
        return
    words = ["--turns", str(args.turns), "--steps", str(args.steps), "--warm-up", str(args.warm_up)]
    words += ["--batch", str(args.batch), "--micro-batches", *map(str, args.micro_batches)]
    rows = run_ranks(__file__, 2, words, timeout_s=300 if args.quick else 1800)
    print("micro-batches   one process   torch 1F1B      farspan   farspan / torch   one process / farspan   losses")
    for row in rows:
        print(
            f"{row['num_micro_batches']:13d} {row['alone_s'] * 1e3:10.1f} ms {row['torch_s'] * 1e3:9.1f} ms "
            f"{row['farspan_s'] * 1e3:9.1f} ms {row['against_torch']:17.3f} {row['against_one']:23.3f}   "
            f"within {row['loss_difference']:.0e}"
        )
    slowest = max(row["against_torch"] for row in rows)
    least = min(row["against_one"] for row in rows)
    figure = (
        f"plain loop over two ranks: {slowest:.3f} of torch's 1F1B (bar {BAR_OF_TORCH}), {least:.2f} x as fast as one "
        f"process (bar {BAR_OF_ONE})"
    )
    holds = slowest <= BAR_OF_TORCH and least >= BAR_OF_ONE
    finish(args, rows=rows, figure=figure, holds=holds and all(row["loss_difference"] < 1e-4 for row in rows))


if __name__ == "__main__":
    main()
