"""What it costs to shard over groups, and what it saves: beside torch's FSDP2, and beside groups that shard nothing.

speed      two processes train Llama's blocks, each on a batch of its own: `data_parallel=2` with each `shard`, without,
           and FSDP2's `fully_shard`, in turns, in one launch.
memory     each way alone, with hardly any activations: what parameters, gradients and AdamW's state take on a rank
           between two steps (bytes of all living tensors), and the most a step takes (resident memory).
link       two hosts with a wire of limited rate, layers that sleep, frozen weights that come over the wire: a step with
           `shard="parameters"` and one without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from benchmarks.common import arguments, finish, run_ranks  # noqa: E402
from benchmarks.schedule_efficiency.devices import Pace, Sleeper  # noqa: E402
from benchmarks.slow_links.hosts import hosts, why_not  # noqa: E402
from benchmarks.slow_links.run import PAYLOAD, environment_of  # noqa: E402
from benchmarks.tensor_axis.llama import HEAD_SIZE, Blocks, sharded  # noqa: E402
from benchmarks.tensor_axis.run import batch_of, living_bytes, resident  # noqa: E402
from benchmarks.vs_torch_pipelining.run import untouched_torch  # noqa: E402

import farspan  # noqa: E402

STEP_BAR, MEMORY_BAR = 1.00, 1.05
WAYS = ("groups", "optimizer", "parameters", "fully_shard")
PROMISED = {"groups": 4.0, "optimizer": 3.0, "parameters": 2.5, "fully_shard": 2.0}
"""Parameters, gradients and AdamW's state of two ranks, in sizes of all parameters."""
NUM_BLOCKS = {256: 4, 512: 2}
"""By width."""
BATCH, LENGTH = 8, 128
MEMORY_WIDTH, MEMORY_BLOCKS = 512, 12
LINK_BAR = 1.1
SHARES = (0.25, 0.5, 1.0)
"""Of the forward of a step, that the weights which another group holds take on the wire."""
NUM_LAYERS, LAYER_S, LAYER_MIB = 8, 0.05, 1.0


class Trained:
    """A model that is trained in one of the ways."""

    def __init__(self, way: str, width: int, num_blocks: int) -> None:
        torch.manual_seed(0)
        model: Any = Blocks(width, num_blocks)
        self.size_bytes = sum(item.numel() * item.element_size() for item in model.parameters())
        if way == "fully_shard":
            self.model: Any = sharded(model, init_device_mesh("cpu", (2,)))
        else:
            self.model = farspan.distribute(model, data_parallel=2, shard=None if way == "groups" else way)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, x: Tensor, y: Tensor) -> float:
        self.optimizer.zero_grad()
        loss = (self.model(x) - y).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def around(way: str) -> contextlib.AbstractContextManager[Any]:
    return untouched_torch() if way == "fully_shard" else contextlib.nullcontext()


def speed_worker(args: argparse.Namespace) -> None:
    """One rank: one of farspan's ways and torch's in turns; rank 0 writes the row."""
    rank, width = int(os.environ["RANK"]), args.width
    ways = (args.way, "fully_shard")
    trained: dict[str, Trained] = {}
    for way in ways:
        with around(way):
            trained[way] = Trained(way, width, NUM_BLOCKS[width])
    times: dict[str, list[float]] = {way: [] for way in ways}
    losses: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(args.warm_up + args.turns):
        x, y = batch_of(2 * turn + rank, width, BATCH, LENGTH)
        for way in ways if turn % 2 else ways[::-1]:
            with around(way):
                with untouched_torch():
                    dist.barrier()
                began = time.perf_counter()
                losses[way].append(trained[way].step(x, y))
                times[way].append(time.perf_counter() - began)
    everyone: list[Any] = [None, None]
    with untouched_torch():
        dist.all_gather_object(everyone, times)
    if rank == 0:
        steps = {way: [max(pair) for pair in zip(*[part[way] for part in everyone], strict=True)] for way in ways}
        steps = {way: each[args.warm_up :] for way, each in steps.items()}
        ratios = [a / b for a, b in zip(steps[args.way], steps["fully_shard"], strict=True)]
        off = max(abs(a / b - 1) for a, b in zip(losses[args.way], losses["fully_shard"], strict=True))
        row = {"part": "speed", "width": width, "way": args.way, "ratio": median(ratios), "losses_off": off}
        row |= {f"{way}_s": median(each) for way, each in steps.items()} | {"steps_s": steps}
        Path(args.worker).write_text(json.dumps(row))
    with untouched_torch():
        dist.barrier()


def memory_worker(args: argparse.Namespace) -> None:
    """One rank of one way: what it holds, and the most it takes."""
    rank, way = int(os.environ["RANK"]), args.way
    small = Trained(way, HEAD_SIZE * 2, 1)
    for turn in range(3):  # what is imported and kept whatever the size
        small.step(*batch_of(2 * turn + rank, HEAD_SIZE * 2, 2, 2))
    del small
    before = resident("VmRSS")
    trained = Trained(way, args.width, args.blocks)
    for turn in range(4):
        if turn == 3:
            Path("/proc/self/clear_refs").write_text("5")
        trained.step(*batch_of(2 * turn + rank, args.width, 2, 2))
    peak = resident("VmHWM") - before
    with contextlib.nullcontext() if way == "fully_shard" else untouched_torch():
        held = living_bytes(trained.model)
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, (held, peak))
        if rank == 0:
            held, peak = (max(part[number] for part in everyone) for number in range(2))
            row = {"part": "memory", "way": way, "held_bytes": held, "peak_bytes": peak, "ranks": everyone}
            Path(args.worker).write_text(json.dumps(row | {"size_bytes": trained.size_bytes}))
        dist.barrier()


class Weighty(Sleeper):
    """A sleeping layer with a frozen weight that is large, and takes no time."""

    def __init__(self) -> None:
        super().__init__(Pace(forward=LAYER_S, input=LAYER_S, weight=LAYER_S))
        self.load = nn.Parameter(torch.zeros(int(LAYER_MIB * (1 << 18))), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.load[: x.shape[-1]])


def link_worker(args: argparse.Namespace) -> None:
    """One rank of two hosts: steps of two models in turns, of which one is sharded."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    shard = None if args.way == "groups" else args.way
    model = farspan.distribute(nn.Sequential(*[Weighty() for _ in range(NUM_LAYERS)]), data_parallel=2, shard=shard)
    optimizer = torch.optim.SGD([item for item in model.parameters() if item.requires_grad], lr=1e-3)
    times: list[float] = []
    for turn in range(args.warm_up + args.turns):
        x = torch.randn(4, 16) + rank
        with untouched_torch():
            dist.barrier()
        began = time.perf_counter()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if turn >= args.warm_up:
            times.append(time.perf_counter() - began)
    everyone: list[Any] = [None, None]
    with untouched_torch():
        dist.all_gather_object(everyone, times)
        if rank == 0:
            step_s = median([max(pair) for pair in zip(*everyone, strict=True)])
            Path(args.worker).write_text(json.dumps({"part": "link", "way": args.way, "step_s": step_s}))
        dist.barrier()


def measure_link(share: float, way: str, turns: int) -> dict[str, Any]:
    gathered_bytes = NUM_LAYERS / 2 * LAYER_MIB * (1 << 20)
    rate = gathered_bytes / PAYLOAD / (share * NUM_LAYERS * LAYER_S)
    with hosts(2, bytes_per_s=rate) as made:
        words = ["--part", "link", "--way", way, "--turns", str(turns), "--warm-up", "3"]
        return run_ranks(__file__, 2, words, timeout_s=300, **environment_of(made)) | {"share": share}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--part", choices=("speed", "memory", "link"), help="that one only")
    parser.add_argument("--turns", type=int, help="of each way; by default 24, 6 with --quick")
    parser.add_argument("--warm-up", type=int, default=4, help="turns before those that count")
    parser.add_argument("--width", type=int, help="that one only")
    parser.add_argument("--blocks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, help="that one only")
    args = parser.parse_args()
    if args.worker:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        {"speed": speed_worker, "memory": memory_worker, "link": link_worker}[args.part](args)
        return
    rows: list[dict[str, Any]] = []
    figures: list[str] = []
    holds = True
    ways = [args.way] if args.way else WAYS
    if args.part in (None, "speed"):
        for width in [args.width] if args.width else NUM_BLOCKS:
            for way in [way for way in ways if way != "fully_shard"]:
                words = ["--part", "speed", "--width", str(width), "--way", way, "--warm-up", str(args.warm_up)]
                words += ["--turns", str(args.turns or (6 if args.quick else 24))]
                row = run_ranks(__file__, 2, words, timeout_s=900)
                rows.append(row)
                print(
                    f"speed   width {width}  {way:10}  {row[f'{way}_s']:.4f} s  "
                    f"fully_shard {row['fully_shard_s']:.4f} s"
                    f"  ratio {row['ratio']:.3f}  losses differ by {row['losses_off']:.1e}",
                    flush=True,
                )
        for way in [way for way in ways if way in ("optimizer", "parameters")]:
            worst = max(row["ratio"] for row in rows if row["way"] == way)
            figures.append(f"{way} / fully_shard {worst:.3f} (bar {STEP_BAR:.2f})")
            holds &= worst <= STEP_BAR
    if args.part in (None, "memory"):
        words = ["--width", str(MEMORY_WIDTH), "--blocks", str(MEMORY_BLOCKS // 3 if args.quick else MEMORY_BLOCKS)]
        arena = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # what is freed is given back
        for way in ways:
            row = run_ranks(__file__, 2, ["--part", "memory", "--way", way, *words], timeout_s=300, environment=arena)
            rows.append(row)
            promised = PROMISED[way] * row["size_bytes"]
            row["held"], row["peak"] = row["held_bytes"] / promised, row["peak_bytes"] / promised
            print(
                f"memory  {way:11}  promised {promised / 1e6:.1f} MB  held {row['held_bytes'] / 1e6:.1f} MB "
                f"({row['held']:.3f})  most {row['peak_bytes'] / 1e6:.1f} MB ({row['peak']:.3f})",
                flush=True,
            )
            if way in ("optimizer", "parameters"):
                figures.append(f"{way} holds {row['held']:.3f} of what is promised (bar {MEMORY_BAR:.2f})")
                holds &= row["held"] <= MEMORY_BAR
    if args.part in (None, "link") and (reason := why_not()):
        print(f"link    not measured: {reason}")
    elif args.part in (None, "link"):
        for share in SHARES:
            plain, row = (measure_link(share, way, 3 if args.quick else 10) for way in ("groups", "parameters"))
            row["ratio"] = row["step_s"] / plain["step_s"]
            rows += [plain, row]
            print(
                f"link    gathering / forward {share:.2f}  step {row['step_s']:.3f} s, nothing sharded "
                f"{plain['step_s']:.3f} s  ratio {row['ratio']:.3f}",
                flush=True,
            )
            if share < 1:
                figures.append(f"gathering / forward {share}: {row['ratio']:.3f} of a step (bar {LINK_BAR})")
                holds &= row["ratio"] <= LINK_BAR
    finish(args, rows=rows, figure=", ".join(figures), holds=holds)


if __name__ == "__main__":
    main()
