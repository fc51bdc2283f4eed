"""The most memory a rank has in a step, against torch.distributed.pipelining's Schedule1F1B, for more micro-batches.

Cheap layers with large boundary tensors. Each side runs in launches of its own, and what the kernel counts as resident
is taken: VmHWM of the second step, less what the process had before its model was made. A small step of the same kind
comes before that, so that code which is loaded late does not count; malloc gives back at once what is freed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.common import arguments, finish, run_ranks  # noqa: E402

import farspan  # noqa: E402

GLOO = {"FARSPAN_SAME_HOST": "0"}
SIDES: dict[str, tuple[str, dict[str, str]]] = {
    "torch": ("torch", {}),
    "1f1b": ("1f1b", {}),
    "auto": ("auto", {}),
    "1f1b over gloo": ("1f1b", GLOO),
}
"""What a worker runs, and with which more variables: without, tensors go from memory to memory."""
MIB = 2**20


class Scaled(nn.Module):
    """A stage: keeps its input and its output for the backward, as large as each other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.9, 1.1, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight)


def loss_of(out: Tensor) -> Tensor:
    return out.square().mean()


def run_steps(side: str, rank: int, num_ranks: int, num_micro_batches: int, width: int, num_steps: int) -> None:
    """Micro-batches of [width, width] floats; both sides are given the same tensor each time."""
    x = torch.ones(width, width)
    if side == "torch":
        stage = PipelineStage(Scaled(width), rank, num_ranks, torch.device("cpu"))
        schedule = Schedule1F1B(
            stage, num_micro_batches, loss_fn=lambda out, _: loss_of(out) / num_micro_batches, scale_grads=False
        )
        for step in range(num_steps):
            start_peak(step)
            given = (x.expand(num_micro_batches, width, width).reshape(-1, width),) if rank == 0 else ()
            target = torch.zeros(num_micro_batches, 1) if rank == num_ranks - 1 else None
            schedule.step(*given, target=target, losses=[] if target is not None else None, return_outputs=False)
            del given
        return
    layers = nn.Sequential(*(Scaled(width) for _ in range(num_ranks)))
    plan = {str(number): f"rank:{number}" for number in range(num_ranks)}
    model = farspan.distribute(layers, plan=plan, schedule=side)
    for step in range(num_steps):
        start_peak(step)
        num_different = num_micro_batches if rank == 0 else 1  # torch's other ranks have none
        whole = x.expand(num_different, width, width).reshape(-1, width)
        for number in range(num_micro_batches):
            begin = number % num_different * width
            (loss_of(model(whole[begin : begin + width])) / num_micro_batches).backward()
        farspan.flush()
        model.zero_grad()
        del whole


def start_peak(step: int) -> None:
    """From the second step on: the kernel forgets the peak so far."""
    if step:
        Path("/proc/self/clear_refs").write_text("5")


def status(key: str) -> int:
    """Bytes, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def worker(args: Any) -> None:
    """One rank of one side."""
    torch.set_num_threads(1)
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    number = args.micro_batches[0]
    run_steps(args.side, rank, num_ranks, 2 * num_ranks, 8, 2)
    dist.barrier()
    before = status("VmRSS")
    run_steps(args.side, rank, num_ranks, number, args.width, 2)
    peak = status("VmHWM") - before
    peaks: list[Any] = [None] * num_ranks
    dist.all_gather_object(peaks, peak)
    if rank == 0:
        Path(args.worker).write_text(json.dumps(peaks))
    dist.barrier()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, help="4, or 2 with --quick")
    parser.add_argument("--micro-batches", type=int, nargs="+", help="per step; 4, 16 and 64, or 4 and 16 with --quick")
    parser.add_argument("--width", type=int, default=1024, help="a boundary tensor has so many rows and columns")
    parser.add_argument("--side", choices=("torch", "1f1b", "auto"), default="torch", help="what a worker runs")
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    args.ranks = args.ranks or (2 if args.quick else 4)
    args.micro_batches = args.micro_batches or ([4, 16] if args.quick else [4, 16, 64])
    os.environ.update({"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"})
    rows: list[dict[str, Any]] = []
    for number in args.micro_batches:
        for side, (schedule, variables) in SIDES.items():
            words = ["--side", schedule, "--micro-batches", str(number), "--width", str(args.width)]
            peaks = run_ranks(__file__, args.ranks, words, timeout_s=300, environment=variables)
            rows.append({"num_micro_batches": number, "side": side, "peak_bytes": peaks})
            shown = "  ".join(f"{peak / MIB:7.1f}" for peak in peaks)
            print(f"{number:3d} micro-batches   {side:14s}  MiB by rank {shown}", flush=True)
    found = {(row["num_micro_batches"], row["side"]): row["peak_bytes"] for row in rows}
    roads = ("1f1b", "1f1b over gloo")
    pairs = [(found[number, side], found[number, "torch"]) for number in args.micro_batches for side in roads]
    above = max(ours / theirs for pair in pairs for ours, theirs in zip(*pair, strict=True))
    tensor_bytes = 4 * args.width**2
    last, before = args.micro_batches[-1], args.micro_batches[-2]
    batch_bytes = (last - before) * tensor_bytes
    growths = [
        more - less - (batch_bytes if rank == 0 else 0)
        for side in roads
        for rank, (more, less) in enumerate(zip(found[last, side], found[before, side], strict=True))
    ]
    figure = (
        f"peak memory of a rank, farspan 1f1b / torch Schedule1F1B: {above:.3f} at most (bar 1.00); from {before} to "
        f"{last} micro-batches, without the batch, {max(growths) / tensor_bytes:.2f} boundary tensors more (bar 1)"
    )
    finish(args, rows=rows, figure=figure, holds=above <= 1 and max(growths) <= tensor_bytes)


if __name__ == "__main__":
    main()
