"""What averaging gradients over groups costs: beside torch's DDP, over a slow link, and as groups become more.

ddp        two processes, the demo's GPT, the same batches: data_parallel=2 and DistributedDataParallel take turns in
           one launch; with one micro-batch in a step, and with four (DDP under no_sync() for all but the last).
link       two hosts with a wire of limited rate between them: layers that sleep, with weights that take a quarter to
           four times as long on the wire as all layers compute. Compute alone and reduction alone take turns with it.
groups     recording a micro-batch, and what a step does for the groups before it runs, with 1 to 64 groups that do not
           exist.
"""

from __future__ import annotations

import argparse
import contextlib
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
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from benchmarks.common import arguments, finish, micros, run_ranks  # noqa: E402
from benchmarks.record_overhead.run import NobodySide, World  # noqa: E402
from benchmarks.schedule_efficiency.devices import Pace, Sleeper  # noqa: E402
from benchmarks.slow_links.hosts import hosts, why_not  # noqa: E402
from benchmarks.slow_links.run import PAYLOAD, environment_of  # noqa: E402
from benchmarks.vs_torch_pipelining.run import batch_of, build, loss_of, untouched_torch  # noqa: E402

import farspan  # noqa: E402
from farspan.execute.agreement.agreement import Agreement  # noqa: E402
from farspan.execute.data_axis.reduction import Reduction  # noqa: E402
from farspan.program.cache import Programs  # noqa: E402
from farspan.program.options import Settings  # noqa: E402

DDP_BAR, LINK_BAR, GROWTH_BAR = 1.02, 1.1, 1.25
LEARNING_RATE = 3e-4
MICRO_BATCHES = (1, 4)
SHARES = (0.25, 0.5, 1.0, 4.0)
"""Of the compute of a step, that its gradients take on the wire."""
FORWARD = 1 / 3
"""Of that compute: before it there are no gradients, so that no order is shorter than forward and reduction."""
NUM_LAYERS, LAYER_S = 8, 0.05
LAYER_MIB = 1.0
NUM_GROUPS = (1, 2, 8, 64)


class Side:
    """One of the two, which runs the same loop.

    Args:
        model: As it is trained.
        num_micro_batches: Of a step.
        unsynchronised: Gives the context of all backwards but the last one.
    """

    def __init__(
        self,
        model: nn.Module,
        num_micro_batches: int,
        unsynchronised: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self.num_micro_batches = num_micro_batches
        self.unsynchronised = unsynchronised
        self.loss = 0.0

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        parts = list(zip(x.chunk(self.num_micro_batches), y.chunk(self.num_micro_batches), strict=True))
        for number, (part_x, part_y) in enumerate(parts):
            is_last = number == len(parts) - 1
            with contextlib.nullcontext() if is_last else self.unsynchronised():
                loss = loss_of(self.model(part_x), part_y) / self.num_micro_batches
                loss.backward()
                losses.append(loss.detach())
        self.optimizer.step()
        self.loss = sum(loss.item() for loss in losses)


def ddp_worker(args: argparse.Namespace) -> None:
    """One rank: both sides in turns; rank 0 writes the row."""
    rank, num_micro_batches = int(os.environ["RANK"]), args.micro_batches
    ours = Side(farspan.distribute(build(), data_parallel=2), num_micro_batches)
    with untouched_torch():
        wrapped = DistributedDataParallel(build())
        theirs = Side(wrapped, num_micro_batches, wrapped.no_sync)
    times: dict[str, list[float]] = {"torch": [], "farspan": []}
    losses: dict[str, list[float]] = {"torch": [], "farspan": []}
    processor: dict[str, list[float]] = {"torch": [], "farspan": []}
    for turn in range(args.warm_up + args.turns):
        x, y = batch_of(2 * turn + rank, 1, args.batch)
        for name in ("torch", "farspan") if turn % 2 == 0 else ("farspan", "torch"):
            with untouched_torch() if name == "torch" else contextlib.nullcontext():
                with untouched_torch():
                    dist.barrier()
                began, began_on_processor = time.perf_counter(), time.process_time()
                side = theirs if name == "torch" else ours
                side.step(x, y)
                times[name].append(time.perf_counter() - began)
                processor[name].append(time.process_time() - began_on_processor)
                losses[name].append(side.loss)
    everyone: list[Any] = [None, None]
    with untouched_torch():
        dist.all_gather_object(everyone, times)
    if rank == 0:
        steps = {name: [max(pair) for pair in zip(*[part[name] for part in everyone], strict=True)] for name in times}
        ratios = [ours / theirs for ours, theirs in zip(steps["farspan"], steps["torch"], strict=True)]
        row = {
            "part": "ddp",
            "micro_batches": num_micro_batches,
            "farspan_s": median(steps["farspan"][args.warm_up :]),
            "torch_s": median(steps["torch"][args.warm_up :]),
            "ratio": median(ratios[args.warm_up :]),
            "processor_ratio": median(processor["farspan"][args.warm_up :])
            / median(processor["torch"][args.warm_up :]),
            "loss_off": max(abs(a - b) for a, b in zip(losses["farspan"], losses["torch"], strict=True)),
            "steps_s": steps,
        }
        Path(args.worker).write_text(json.dumps(row))
    with untouched_torch():
        dist.barrier()


class Weighty(Sleeper):
    """A sleeping layer with a weight of its own that is large, and takes no time."""

    def __init__(self, pace: Pace, mib: float) -> None:
        super().__init__(pace)
        self.load = nn.Parameter(torch.zeros(int(mib * (1 << 18))))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.load[: x.shape[-1]])


def link_worker(args: argparse.Namespace) -> None:
    """One rank of two hosts: a step, its compute alone, and its reduction alone, in turns."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    pace = Pace(forward=LAYER_S, input=LAYER_S, weight=LAYER_S)
    layers = [Weighty(pace, LAYER_MIB) for _ in range(NUM_LAYERS)]
    model = farspan.distribute(nn.Sequential(*layers), data_parallel=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    gradients = [torch.ones(int(LAYER_MIB * (1 << 18))) for _ in range(NUM_LAYERS)]
    x = torch.randn(4, 16) + rank

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def compute() -> None:
        model(x).sum().backward()
        farspan.flush()

    def discard() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def reduce() -> None:
        with untouched_torch():
            works: list[Any] = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
            for work in works:
                work.wait()

    times: dict[str, list[float]] = {"step": [], "compute": [], "reduction": []}
    for _ in range(args.turns + 1):
        for name, function, after in (("step", step, None), ("compute", compute, discard), ("reduction", reduce, None)):
            with untouched_torch():
                dist.barrier()
            began = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - began)
            if after is not None:
                after()
    everyone: list[Any] = [None, None]
    with untouched_torch():
        dist.all_gather_object(everyone, times)
    if rank == 0:
        found = {
            name: median([max(pair) for pair in zip(*[part[name] for part in everyone], strict=True)][1:])
            for name in times
        }
        bound = max(found["compute"], found["reduction"])
        least = max(found["compute"], FORWARD * found["compute"] + found["reduction"])
        row = {"part": "link", "share": args.share, **{f"{name}_s": s for name, s in found.items()}}
        row |= {"ratio": found["step"] / bound, "to_least": found["step"] / least, "times": everyone}
        Path(args.worker).write_text(json.dumps(row))
    with untouched_torch():
        dist.barrier()


def measure_link(share: float, turns: int) -> dict[str, Any]:
    size_bytes = NUM_LAYERS * LAYER_MIB * (1 << 20)
    rate = size_bytes / PAYLOAD / (share * NUM_LAYERS * 3 * LAYER_S)
    words = ["--part", "link", "--share", str(share), "--turns", str(turns)]
    with hosts(2, bytes_per_s=rate) as made:
        return run_ranks(__file__, 2, words, timeout_s=900, **environment_of(made))


class Nobody(NobodySide):
    """The channel of all ranks of groups that do not exist, and of this rank's group."""

    def __init__(self, num_groups: int) -> None:
        super().__init__(0, 2 * num_groups)
        self.everybody = self
        self.number, self.num_groups = 0, num_groups


class SamePeers:
    """The ranks at this one's position in the other groups: they add to the same gradients."""

    def maximum(self, flat: Tensor) -> SamePeers:
        return self

    def is_done(self) -> bool:
        return True


class GroupWorld(World):
    """Rank 0 of a group of two, one of several."""

    def __init__(self, num_groups: int) -> None:
        super().__init__(0, 2, 16)
        self.run(self._divide, num_groups)

    def _divide(self, num_groups: int) -> None:
        nobody: Any = Nobody(num_groups)
        peers: Any = SamePeers()
        if num_groups > 1:
            self.engine.groups = Reduction(self.engine, nobody, peers, Agreement(nobody, 1.0))
        self.programs = Programs()

    def begin(self) -> float:
        """Seconds that a step of 8 micro-batches takes for the groups before it runs."""
        return self.run(self._begin)

    def _begin(self) -> float:
        engine = self.engine
        _, graphs = self._record(8)
        settings = Settings(
            teams=tuple(engine.teams), rank=0, num_ranks=self.num_ranks, lookahead=engine.lookahead, home_stages=()
        )
        with engine.executing():
            program = self.programs.program_of(graphs, settings)
            began = time.perf_counter()
            engine.groups.note(graphs, program, lambda: (), ends_window=True)
            taken = time.perf_counter() - began
        if isinstance(engine.groups, Reduction):
            engine.groups._window, engine.executor.after_action = None, None
        return taken


def measure_groups(turns: int) -> list[dict[str, Any]]:
    """Worlds that take turns: one pipeline of two ranks, of which there are more and more."""
    worlds = {number: GroupWorld(number) for number in NUM_GROUPS}
    record: dict[int, list[float]] = {number: [] for number in NUM_GROUPS}
    begin: dict[int, list[float]] = {number: [] for number in NUM_GROUPS}
    for _ in range(turns + 3):
        for number, world in worlds.items():
            record[number] += world.record(8)
            begin[number].append(world.begin())
    return [
        {"part": "groups", "groups": n, "record_s": median(record[n][24:]), "note_s": median(begin[n][3:])}
        for n in NUM_GROUPS
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--part", choices=("ddp", "link", "groups"), help="that one only")
    parser.add_argument("--turns", type=int, help="of each side; by default 60, 6 over the link, fewer with --quick")
    parser.add_argument("--warm-up", type=int, default=5, help="turns before those that count")
    parser.add_argument("--batch", type=int, default=8, help="windows of text in a step of one group")
    parser.add_argument("--micro-batches", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        (ddp_worker if args.part == "ddp" else link_worker)(args)
        return
    rows: list[dict[str, Any]] = []
    figures: list[str] = []
    holds = True
    if args.part in (None, "ddp"):
        turns = args.turns or (15 if args.quick else 60)
        for number in MICRO_BATCHES:
            words = ["--part", "ddp", "--micro-batches", str(number), "--turns", str(turns), "--batch", str(args.batch)]
            row = run_ranks(__file__, 2, words, timeout_s=1800)
            rows.append(row)
            print(
                f"ddp     {number} micro-batches  farspan {row['farspan_s']:.4f} s  torch {row['torch_s']:.4f} s  "
                f"ratio {row['ratio']:.3f}, on the processor {row['processor_ratio']:.3f}  "
                f"losses differ by {row['loss_off']:.1e}"
            )
        worst = max(row["ratio"] for row in rows)
        figures.append(f"step / DDP {worst:.3f} (bar {DDP_BAR:.2f})")
        holds &= worst <= DDP_BAR
    if args.part in (None, "link") and not (reason := why_not()):
        found = [measure_link(share, args.turns or (2 if args.quick else 6)) for share in SHARES]
        for row in found:
            print(
                f"link    reduction / compute {row['share']:.1f}  step {row['step_s']:.3f} s  compute "
                f"{row['compute_s']:.3f} s  reduction {row['reduction_s']:.3f} s  ratio {row['ratio']:.3f}  "
                f"over the least {row['to_least']:.3f}"
            )
        rows += found
        worst = max(row["ratio"] for row in found)
        figures.append(f"over a slow link step / max(compute, reduction) {worst:.3f} (bar {LINK_BAR:.1f})")
        holds &= worst <= LINK_BAR
    elif args.part in (None, "link"):
        print(f"link    skipped: {reason}")
    if args.part in (None, "groups"):
        found = measure_groups(args.turns or (10 if args.quick else 40))
        for row in found:
            print(f"groups  {row['groups']:3d}  record {micros(row['record_s'])}  note {micros(row['note_s'])}")
        rows += found
        growth = max(row["record_s"] for row in found) / found[0]["record_s"]
        figures.append(f"recording from 1 to {NUM_GROUPS[-1]} groups {growth:.2f} x (bar {GROWTH_BAR:.2f})")
        holds &= growth <= GROWTH_BAR
    finish(args, rows=rows, figure=", ".join(figures), holds=holds)


if __name__ == "__main__":
    main()
