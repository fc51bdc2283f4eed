"""What it costs to run each layer on two ranks together: beside torch's own ways, beside one process, and in memory.

speed      two processes train Llama's blocks: `tensor_parallel=2`, `parallelize_module` by hand, FSDP2's `fully_shard`
           (each rank half of the batch), and rank 0 alone, in turns, in one launch; and what no way can be faster than:
           each rank computes with halves of all matrices, and hears nothing of the other.
memory     each way alone, with hardly any activations: what parameters, gradients and AdamW's state take on a rank
           between two steps (bytes of all living tensors), and the most a step takes (resident memory).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from benchmarks.common import arguments, finish, run_ranks  # noqa: E402
from benchmarks.tensor_axis.llama import HEAD_SIZE, Blocks, parallelized, sharded  # noqa: E402
from benchmarks.vs_torch_pipelining.run import untouched_torch  # noqa: E402

import farspan  # noqa: E402
from farspan.torch_private import raw_grad  # noqa: E402

PEER_BAR, ALONE_BAR, MEMORY_BAR = 1.00, 1.7, 1.05
WAYS = ("farspan", "parallelize_module", "fully_shard", "alone", "unjoined")
SIZES = ((256, 4, 128), (512, 2, 128), (1024, 1, 128), (1024, 1, 512))
"""Width, blocks and length of a sequence."""
BOUND_BY_COMPUTE = (1024, 1, 512)
"""The size that is compared with one process: 4096 positions, so that matrices are read once for many products."""
BATCH = 8
MEMORY_WIDTH, MEMORY_BLOCKS = 512, 12


class Trained:
    """A model that is trained in one of the ways.

    Args:
        way: One of `WAYS`.
        width: Of the model.
        num_blocks: Of the model.
    """

    def __init__(self, way: str, width: int, num_blocks: int) -> None:
        torch.manual_seed(0)
        rank, model = int(os.environ["RANK"]), Blocks(width, num_blocks, 2 if way == "unjoined" else 1)
        self.is_idle = way == "alone" and rank > 0
        self.own: Callable[[Tensor], Tensor] = (lambda x: x.chunk(2)[rank]) if way == "fully_shard" else lambda x: x
        if way == "farspan":
            self.model: nn.Module = farspan.distribute(model, tensor_parallel=2)
        elif way in ("parallelize_module", "fully_shard"):
            mesh = init_device_mesh("cpu", (2,))
            self.model = (parallelized if way == "parallelize_module" else sharded)(model, mesh)
        else:
            self.model = model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, x: Tensor, y: Tensor) -> float:
        if self.is_idle:
            return 0.0
        self.optimizer.zero_grad()
        loss = (self.model(self.own(x)) - self.own(y)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def batch_of(turn: int, width: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(turn)
    x, y = torch.randn(2, batch, length, width, generator=generator)
    return x, y


def speed_worker(args: argparse.Namespace) -> None:
    """One rank: all ways in turns; rank 0 writes the row."""
    rank, width = int(os.environ["RANK"]), args.width
    trained = {"farspan": Trained("farspan", width, args.blocks)}
    with untouched_torch():
        trained |= {way: Trained(way, width, args.blocks) for way in WAYS[1:]}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    losses: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(args.warm_up + args.turns):
        x, y = batch_of(turn, width, BATCH, args.length)
        for way in WAYS[turn % len(WAYS) :] + WAYS[: turn % len(WAYS)]:
            with untouched_torch() if way != "farspan" else contextlib.nullcontext():
                with untouched_torch():
                    dist.barrier()
                began = time.perf_counter()
                losses[way].append(trained[way].step(x, y))
                times[way].append(time.perf_counter() - began)
    everyone: list[Any] = [None, None]
    with untouched_torch():
        dist.all_gather_object(everyone, (times, losses))
    if rank == 0:
        steps = {way: [max(pair) for pair in zip(*[part[0][way] for part in everyone], strict=True)] for way in WAYS}
        steps = {way: each[args.warm_up :] for way, each in steps.items()}
        halves = [part[1]["fully_shard"] for part in everyone]
        losses["fully_shard"] = [sum(pair) / 2 for pair in zip(*halves, strict=True)]
        row: dict[str, Any] = {"part": "speed", "width": width, "blocks": args.blocks, "length": args.length}
        row["steps_s"] = steps
        row |= {f"{way}_s": median(each) for way, each in steps.items()}
        for way in WAYS[1:]:
            row[f"to_{way}"] = median([a / b for a, b in zip(steps["farspan"], steps[way], strict=True)])
        alone = losses["alone"]
        row["at_most"] = median([a / b for a, b in zip(steps["alone"], steps["unjoined"], strict=True)])
        row["losses_off"] = max(abs(a / b - 1) for way in WAYS[:3] for a, b in zip(losses[way], alone, strict=True))
        Path(args.worker).write_text(json.dumps(row))
    with untouched_torch():
        dist.barrier()


def living_bytes(model: nn.Module) -> int:
    """Bytes of all tensors of this process, each memory once."""
    gc.collect()
    kinds = (Tensor, nn.Parameter, DTensor)  # a recorded tensor has no memory: what it stands for is a tensor beside it
    found = [item for item in gc.get_objects() if type(item) in kinds]
    found += [grad for item in model.parameters() if (grad := raw_grad(item)) is not None]
    storages: dict[int, int] = {}
    for item in found:
        local: Any = item._local_tensor if isinstance(item, DTensor) else item
        if type(local) in kinds and local.device.type == "cpu":
            storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    storages.pop(0, None)
    return sum(storages.values())


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def memory_worker(args: argparse.Namespace) -> None:
    """One rank of one way: what it holds, and the most it takes."""
    rank, way = int(os.environ["RANK"]), args.way
    for width in (
        HEAD_SIZE * 2,
        HEAD_SIZE * 4,
    ):  # what is imported and kept for any size
        small = Trained(way, width, 1)
        for turn in range(4):
            small.step(*batch_of(turn, width, 2, 2))
        del small
    before = resident("VmRSS")
    trained = Trained(way, args.width, args.blocks)
    for turn in range(4):
        if turn == 3:
            Path("/proc/self/clear_refs").write_text("5")
        trained.step(*batch_of(turn, args.width, 2, 2))
    peak = resident("VmHWM") - before
    with untouched_torch() if way == "farspan" else contextlib.nullcontext():
        held = living_bytes(trained.model)
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, (held, peak))
        if rank == 0:
            ranks = everyone[:1] if way == "alone" else everyone
            held, peak = (max(part[number] for part in ranks) for number in range(2))
            row = {"part": "memory", "way": way, "held_bytes": held, "peak_bytes": peak, "ranks": everyone}
            Path(args.worker).write_text(json.dumps(row))
        dist.barrier()


def measure_memory(quick: bool) -> list[dict[str, Any]]:
    words = ["--width", str(MEMORY_WIDTH), "--blocks", str(MEMORY_BLOCKS // 3 if quick else MEMORY_BLOCKS)]
    arena = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # what is freed is given back
    return [
        run_ranks(__file__, 2, ["--part", "memory", "--way", way, *words], timeout_s=300, environment=arena)
        for way in WAYS[:4]
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--part", choices=("speed", "memory"), help="that one only")
    parser.add_argument("--turns", type=int, help="of each way; by default 24, 6 with --quick")
    parser.add_argument("--warm-up", type=int, default=4, help="turns before those that count")
    parser.add_argument("--width", type=int, help="one size only, of this width")
    parser.add_argument("--length", type=int, default=128, help="of that size")
    parser.add_argument("--blocks", type=int, help="of that size; by default 1")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        (speed_worker if args.part == "speed" else memory_worker)(args)
        return
    rows: list[dict[str, Any]] = []
    figures: list[str] = []
    holds = True
    if args.part in (None, "speed"):
        turns = args.turns or (6 if args.quick else 24)
        for size in [(args.width, args.blocks or 1, args.length)] if args.width else SIZES:
            words = ["--part", "speed", "--turns", str(turns), "--warm-up", str(args.warm_up)]
            for name, number in zip(("--width", "--blocks", "--length"), size, strict=True):
                words += [name, str(number)]
            row = run_ranks(__file__, 2, words, timeout_s=1800)
            rows.append(row)
            print(
                f"speed   width {size[0]}, {BATCH} x {size[2]} positions  "
                + "  ".join(f"{way} {row[f'{way}_s']:.4f} s" for way in WAYS)
                + f"  against one {1 / row['to_alone']:.2f} x, at most {row['at_most']:.2f} x"
                + f"  losses differ by {row['losses_off']:.1e}"
            )
        peers = {way: max(row[f"to_{way}"] for row in rows) for way in WAYS[1:3]}
        figures += [f"step / {way} {ratio:.3f} (bar {PEER_BAR:.2f})" for way, ratio in peers.items()]
        holds &= max(peers.values()) <= PEER_BAR
        for row in [row for row in rows if (row["width"], row["blocks"], row["length"]) == BOUND_BY_COMPUTE]:
            faster = 1 / row["to_alone"]
            figures.append(
                f"width {row['width']}, {BATCH} x {row['length']} positions against one process {faster:.2f} x "
                f"(bar {ALONE_BAR:.1f}; at most {row['at_most']:.2f} x)"
            )
            holds &= faster >= ALONE_BAR
    if args.part in (None, "memory"):
        found = measure_memory(args.quick)
        alone = found[WAYS.index("alone")]
        for row in found:
            for name in ("held", "peak"):
                row[name] = row[f"{name}_bytes"] / (alone[f"{name}_bytes"] / 2)
            print(
                f"memory  {row['way']:<18}  held {row['held_bytes'] / 2**20:7.1f} MiB ({row['held']:.3f} of a half)  "
                f"peak {row['peak_bytes'] / 2**20:7.1f} MiB ({row['peak']:.3f})"
            )
        rows += found
        held, peak = found[0]["held"], found[0]["peak"]
        figures.append(f"memory of a rank / half of one process's: held {held:.3f}, peak {peak:.3f} (bar {MEMORY_BAR})")
        holds &= max(held, peak) <= MEMORY_BAR
    finish(args, rows=rows, figure=", ".join(figures), holds=holds)


if __name__ == "__main__":
    main()
