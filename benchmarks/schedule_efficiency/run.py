"""How near a step comes to its schedule's bound, and to torch.distributed.pipelining's schedules, on emulated devices.

Each rank is a process whose layers sleep: forward, input gradient and weight gradient take given times, whatever else
the cores do. Both sides run the same layers on the same ranks and take turns in one launch; all ranks leave a barrier
together, and a step ends when the last rank has ended. The bound is `planner.simulate` of the very orders that farspan
runs, with the times that the layers sleep and messages that take none. "tasks" is from the first task of any rank to
the end of the last one: without recording and making the program, which all ranks do on the same few cores here.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.common import arguments, finish, run_ranks  # noqa: E402
from benchmarks.schedule_efficiency.devices import WIDTH, Model, Pace, as_run, layers_of, places  # noqa: E402
from benchmarks.vs_torch_pipelining.run import spans, untouched_torch  # noqa: E402

import farspan  # noqa: E402
from farspan.execute.process.world import current_engine  # noqa: E402
from farspan.planner import simulate  # noqa: E402
from farspan.schedule import LEAST_WEIGHT_WORK_S  # noqa: E402
from farspan.torch_private import raw_grad  # noqa: E402

BAR, BAR_TORCH = 1.03, 1.00
SHAPES: dict[str, Any] = {
    "straight": Schedule1F1B,
    "looped": ScheduleInterleaved1F1B,
    "vee": ScheduleZBVZeroBubble,
}
SCHEDULES = {"straight": ("1f1b", "zero-bubble"), "looped": ("1f1b", "zero-bubble"), "vee": ("zero-bubble",)}
RUN_AHEAD = {"1f1b": 0, "zero-bubble": 1}


class Side(Protocol):
    """One way to run a step."""

    def step(self, x: Tensor) -> None: ...
    def clear(self) -> None: ...


class TorchSide:
    """torch.distributed.pipelining, as its documentation uses it."""

    def __init__(self, shape: str, rank: int, num_ranks: int, paces: list[Pace], num_micro_batches: int) -> None:
        ranks = places(shape, num_ranks)
        layers = list(Model(paces).layers)
        per_stage = len(layers) // len(ranks)
        stages = [number for number, place in enumerate(ranks) if place == rank]
        self.names: dict[str, nn.Parameter] = {}
        modules: list[nn.Module] = []
        for stage in stages:
            own = range(stage * per_stage, (stage + 1) * per_stage)
            self.names.update({f"layers.{number}.weight": layers[number].weight for number in own})  # type: ignore[misc]
            modules.append(nn.Sequential(*(layers[number] for number in own)))
        made = [
            PipelineStage(module, stage, len(ranks), torch.device("cpu"))
            for stage, module in zip(stages, modules, strict=True)
        ]
        self.schedule = SHAPES[shape](
            made[0] if shape == "straight" else made,
            num_micro_batches,
            loss_fn=lambda out, _: loss_of(out) / num_micro_batches,
            scale_grads=False,
        )
        self.has_first, self.has_last = 0 in stages, len(ranks) - 1 in stages

    def step(self, x: Tensor) -> None:
        given = (x,) if self.has_first else ()
        wanted: dict[str, Any] = {"target": x, "losses": []} if self.has_last else {}
        self.schedule.step(*given, **wanted, return_outputs=False)

    def clear(self) -> None:
        for parameter in self.names.values():
            parameter.grad = None

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: parameter.grad for name, parameter in self.names.items()}


class FarspanSide:
    """The plain loop."""

    def __init__(self, shape: str, name: str, num_ranks: int, paces: list[Pace], num_micro_batches: int) -> None:
        ranks = places(shape, num_ranks)
        per_stage = len(paces) // len(ranks)
        plan = farspan.Plan(
            stages=tuple(f"rank:{rank}" for rank in ranks),
            placement={f"layers.{number}": number // per_stage for number in range(len(paces))},
        )
        self.name, self.num_micro_batches = name, num_micro_batches
        self.model = farspan.distribute(Model(paces), plan=plan, schedule=name)

    def step(self, x: Tensor) -> None:
        engine = current_engine()
        assert engine is not None
        engine.schedule, engine.least_weight_work_s = self.name, LEAST_WEIGHT_WORK_S[self.name]  # many models here
        for part in x.chunk(self.num_micro_batches):
            (loss_of(self.model(part)) / self.num_micro_batches).backward()
        farspan.flush()

    def clear(self) -> None:
        self.model.zero_grad()

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: raw_grad(parameter) for name, parameter in self.model.named_parameters()}

    def run(self) -> tuple[int, int]:
        """When this rank's first task began, and when its last one ended."""
        engine = current_engine()
        assert engine is not None
        tasks = [item for item in engine.executor.traces if item.kind != "wait"]
        return tasks[0].start_ns, tasks[-1].end_ns

    def tasks(self) -> list[str]:
        engine = current_engine()
        assert engine is not None
        return [f"{item.kind}{item.micro_batch}" for item in engine.executor.traces if item.kind != "wait"]


def loss_of(out: Tensor) -> Tensor:
    return out.square().mean()


def worker(args: Any) -> None:
    """One rank: all sides in turns; rank 0 writes the rows."""
    torch.set_num_threads(1)
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    rows: list[dict[str, Any]] = []
    for number in args.micro_batches:
        for kind in args.stages:
            for shape in args.placements:
                rows += measure(rank, num_ranks, number, kind, shape, args)
    if rank == 0:
        Path(args.worker).write_text(json.dumps(rows))
    dist.barrier()


def measure(
    rank: int, num_ranks: int, num_micro_batches: int, kind: str, shape: str, args: Any
) -> list[dict[str, Any]]:
    paces = layers_of(num_ranks, args.unit / 2e3, is_equal=kind == "equal")
    ours = {name: FarspanSide(shape, name, num_ranks, paces, num_micro_batches) for name in SCHEDULES[shape]}
    with untouched_torch():
        theirs = TorchSide(shape, rank, num_ranks, paces, num_micro_batches)
    x = torch.randn(num_micro_batches, WIDTH, generator=torch.Generator().manual_seed(1))
    schedules = {
        name: as_run(name, places(shape, num_ranks), paces, num_micro_batches, run_ahead=RUN_AHEAD[name])
        for name in ours
    }
    runs: dict[str, list[tuple[int, int]]] = {name: [] for name in ours}

    def note(name: str, side: FarspanSide) -> None:
        check_order(rank, name, side, schedules[name])
        runs[name].append(side.run())

    times = take_turns(rank, theirs, ours, x, args.turns, note)
    runs = {name: found[1:] for name, found in runs.items()}  # the first one warms up
    everyone: list[Any] = [None] * num_ranks
    with untouched_torch():
        dist.all_gather_object(everyone, {"step": times, "run": runs})
    span = {name: spans([part["step"][name] for part in everyone]) for name in times}
    span_of_run = {name: spans([part["run"][name] for part in everyone]) for name in runs}
    rows: list[dict[str, Any]] = []
    for name, schedule in schedules.items():
        bound = simulate(schedule).step_time
        rows.append(
            {
                "num_ranks": num_ranks,
                "num_micro_batches": num_micro_batches,
                "stages": kind,
                "shape": shape,
                "schedule": name,
                "torch_schedule": SHAPES[shape].__name__,
                "bound_s": bound,
                "farspan_s": median(span[name]),
                "torch_s": median(span["torch"]),
                "run_s": median(span_of_run[name]),
                "to_bound": median(span[name]) / bound,
                "to_torch": median(span[name]) / median(span["torch"]),
                "steps_s": {"farspan": span[name], "torch": span["torch"]},
            }
        )
    return rows


def take_turns(
    rank: int,
    theirs: TorchSide,
    ours: dict[str, FarspanSide],
    x: Tensor,
    turns: int,
    note: Callable[[str, FarspanSide], None] = lambda name, side: None,
) -> dict[str, list[tuple[int, int]]]:
    """When each step began and ended here, by side, without the first turn, which warms up.

    Args:
        rank: This one.
        theirs: Goes by "torch".
        ours: By name.
        x: What each step is given.
        turns: How many are timed.
        note: Called after each step of ours.
    """
    times: dict[str, list[tuple[int, int]]] = {"torch": [], **{name: [] for name in ours}}
    for turn in range(turns + 1):
        for name in list(times) if turn % 2 else list(times)[::-1]:
            if name == "torch":
                with untouched_torch():
                    theirs.clear()
                    found = timed(theirs, x)
                    wanted = {key: grad for key, grad in theirs.gradients().items() if grad is not None}
            else:
                ours[name].clear()
                found = timed(ours[name], x)
                note(name, ours[name])
            if turn:
                times[name].append(found)
        for name, side in ours.items():
            with untouched_torch():
                check_gradients(rank, name, wanted, side.gradients())
    return times


def timed(side: Side, x: Tensor) -> tuple[int, int]:
    dist.barrier()  # rank 0 tells the others that a step has ended, which it could not do while it collects
    gc.collect()  # all ranks make the same objects: the whole heap would be looked at on all of them in the same step
    dist.barrier()
    began = time.perf_counter_ns()
    side.step(x)
    return began, time.perf_counter_ns()


def check_order(rank: int, name: str, side: FarspanSide, schedule: Any) -> None:
    """What has been simulated is what has run."""
    tasks = [schedule.tasks[index] for index in schedule.orders[rank]]
    expected, found = [f"{task.kind.value}{task.micro_batch}" for task in tasks], side.tasks()
    if expected != found:
        raise AssertionError(f"rank {rank}, {name}: ran {' '.join(found)}, simulated was {' '.join(expected)}")


def check_gradients(rank: int, name: str, wanted: dict[str, Tensor], found: dict[str, Tensor | None]) -> None:
    for key, gradient in wanted.items():
        other = found[key]
        if other is None or not torch.allclose(gradient, other, rtol=1e-5, atol=1e-7):
            raise AssertionError(f"rank {rank}, {name}: {key} has another gradient than under torch")


def collect(args: Any) -> list[dict[str, Any]]:
    """The rows of all cases that the arguments name; in a worker it does not return."""
    args.ranks = args.ranks or ([4] if args.quick else [4, 8])
    args.micro_batches = args.micro_batches or ([8] if args.quick else [8, 32])
    args.stages = args.stages or (["unequal"] if args.quick else ["equal", "unequal"])
    args.placements = args.placements or list(SHAPES)
    args.turns = args.turns or (2 if args.quick else 5)
    args.unit = args.unit or (40.0 if args.quick else 100.0)
    if args.worker:
        worker(args)
        sys.exit()
    rows: list[dict[str, Any]] = []
    for num_ranks, *case in itertools.product(args.ranks, args.micro_batches, args.stages, args.placements):
        words = ["--turns", str(args.turns), "--unit", str(args.unit)]
        for option, value in zip(("--micro-batches", "--stages", "--placements"), case, strict=True):
            words += [option, str(value)]
        found = run_ranks(__file__, num_ranks, words, timeout_s=300 if args.quick else 3600)
        show(found, has_head=not rows)
        rows += found
    return rows


def add_arguments(parser: Any) -> None:
    """What `collect` reads."""
    parser.add_argument("--ranks", type=int, nargs="+", help="4 and 8, or 4 with --quick")
    parser.add_argument("--micro-batches", type=int, nargs="+", help="per step; 8 and 32, or 8 with --quick")
    parser.add_argument("--stages", nargs="+", choices=("equal", "unequal"), help="both, or unequal with --quick")
    parser.add_argument("--placements", nargs="+", choices=tuple(SHAPES), help="all three")
    parser.add_argument("--turns", type=int, help="of each side; 5, or 2 with --quick")
    parser.add_argument("--unit", type=float, help="milliseconds of a stage's forward; 100, or 40 with --quick")


def main() -> None:
    parser = arguments(__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    rows = collect(args)
    worst, worst_torch = max(row["to_bound"] for row in rows), max(best_to_torch(rows).values())
    figure = (
        f"step / simulated bound {worst:.3f} at most (bar {BAR:.2f}), "
        f"step / torch's, best schedule of the same placement, {worst_torch:.3f} at most (bar {BAR_TORCH:.2f})"
    )
    finish(args, rows=rows, figure=figure, holds=worst <= BAR and worst_torch <= BAR_TORCH)


def best_to_torch(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], float]:
    """By case, farspan's better schedule over torch's."""
    found: dict[tuple[Any, ...], float] = {}
    for row in rows:
        case = row["num_ranks"], row["num_micro_batches"], row["stages"], row["shape"]
        found[case] = min(found.get(case, row["to_torch"]), row["to_torch"])
    return found


def show(rows: list[dict[str, Any]], *, has_head: bool) -> None:
    if has_head:
        head = "ranks  micro-batches  stages   placement  schedule        bound    farspan  / bound  tasks / bound"
        print(f"{head}  {'torch':31s}  / torch")
    for row in rows:
        print(
            f"{row['num_ranks']:5d}  {row['num_micro_batches']:13d}  {row['stages']:7s}  {row['shape']:9s}  "
            f"{row['schedule']:11s}  {row['bound_s']:7.3f} s  {row['farspan_s']:7.3f} s  {row['to_bound']:7.3f}  "
            f"{row['run_s'] / row['bound_s']:13.3f}  "
            f"{row['torch_s']:.3f} s {row['torch_schedule']:23s}  {row['to_torch']:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
