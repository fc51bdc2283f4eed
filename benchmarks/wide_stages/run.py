"""Wide stages on emulated devices: how near a step comes to its bound, and how much faster it is than without width.

Each rank is a process whose layers sleep, as in `schedule_efficiency`. The model is two layers, one several times as
long as the other: no plan without width can use more ranks than there are layers. "2-1" is two ranks that take
micro-batches in turn on the first layer, and one on the second. The bound is `planner.simulate` of the very orders that
farspan runs, with the times that the layers sleep and messages that take none.

"found" is a model of four layers on three ranks, of which the first takes four times as long as the others: once with
distribute(stages="wide"), once with distribute alone. Both plans are found from what the first step takes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.common import arguments, finish, run_ranks  # noqa: E402
from benchmarks.schedule_efficiency.devices import WIDTH, Model, Pace  # noqa: E402

import farspan  # noqa: E402
from farspan.execute.process.world import current_engine  # noqa: E402
from farspan.planner import simulate  # noqa: E402
from farspan.schedule import Kind, Schedule  # noqa: E402

BAR = 1.05
SHAPES = {"2-1": (2, 1), "3-1": (3, 1), "2-2": (1, 1)}
"""Seconds of each layer in units, by the number of ranks that each has."""
FOUND = (4, 1, 1, 1)
"""The same of the model whose plan is found."""


def widths_of(shape: str) -> list[int]:
    return [int(width) for width in shape.split("-")]


def plans_of(shape: str) -> dict[str, tuple[str, ...]]:
    """Who runs each layer: with width, and the best there is without."""
    first, second = widths_of(shape)
    members = "+".join(f"rank:{rank}" for rank in range(first))
    others = "+".join(f"rank:{rank}" for rank in range(first, first + second))
    return {"wide": (members, others), "narrow": ("rank:0", f"rank:{first}")}


def worker(args: Any) -> None:
    torch.set_num_threads(1)
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")  # for barriers
    unit = args.unit / 1e3
    paces = [Pace(forward=unit * work, input=unit * work, weight=unit * work) for work in SHAPES[args.shape]]
    models: dict[str, Any] = {}
    for name, stages in plans_of(args.shape).items():
        idle = [f"rank:{other}" for other in range(num_ranks)] if name == "narrow" else []
        plan = farspan.Plan(
            stages=(*stages, *[place for place in idle if place not in stages]),
            placement={"layers.0": 0, "layers.1": 1},
            schedule=args.schedule,
        )
        models[name] = farspan.distribute(Model(paces), plan=plan, gradient_reduction=args.reduction)
    x = torch.randn(args.micro_batches, WIDTH, generator=torch.Generator().manual_seed(1))
    found: dict[str, Any] = {name: [] for name in models}
    bounds: dict[str, float] = {}
    for _ in range(args.turns + 1):
        for name, model in models.items():
            model.zero_grad()
            dist.barrier()
            began = time.perf_counter_ns()
            for part in x.chunk(args.micro_batches):
                (model(part).square().mean() / args.micro_batches).backward()
            farspan.flush()
            found[name].append((began, time.perf_counter_ns()))
            bounds[name] = bound_of(paces)
            if args.verbose and name == "wide":
                show(rank)
    everyone: list[Any] = [None] * num_ranks
    dist.all_gather_object(everyone, found)
    if rank == 0:
        rows = []
        for name, bound in bounds.items():
            spans = [
                (max(end for _, end in times) - min(begin for begin, _ in times)) / 1e9
                for times in list(zip(*(each[name] for each in everyone), strict=True))[1:]
            ]
            rows.append({"shape": args.shape, "plan": name, "bound_s": bound, "step_s": median(spans), "spans": spans})
        Path(args.worker).write_text(json.dumps(rows))
    dist.barrier()


def found_worker(args: Any) -> None:
    """One rank of a program whose plan is found: steps behind the one that is measured."""
    torch.set_num_threads(1)
    rank, unit = int(os.environ["RANK"]), args.unit / 1e3
    dist.init_process_group("gloo")  # for barriers
    paces = [Pace(forward=unit * work, input=unit * work, weight=unit * work) for work in FOUND]
    model = farspan.distribute(Model(paces), stages=args.stages, measure=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(args.micro_batches, WIDTH, generator=torch.Generator().manual_seed(1))
    spans: list[float] = []
    for _ in range(args.turns + 2):
        dist.barrier()
        began = time.perf_counter()
        for part in x.chunk(args.micro_batches):
            (model(part).square().mean() / args.micro_batches).backward()
        optimizer.step()
        dist.barrier()
        spans.append(time.perf_counter() - began)
        optimizer.zero_grad()
    if rank == 0:
        plan = farspan.plan_of(model)
        row = {"shape": "found", "plan": list(plan.stages), "step_s": median(spans[2:]), "spans": spans}
        Path(args.worker).write_text(json.dumps(row))
    dist.barrier()


def measure_found(args: Any) -> list[dict[str, Any]]:
    """The wide plan that is found, and the best without width."""
    rows: list[dict[str, Any]] = []
    for stages in ("wide", "auto"):
        words = ["--shape", "found", "--stages", stages, "--unit", str(args.unit / 2)]
        words += ["--micro-batches", str(args.micro_batches), "--turns", str(args.turns)]
        with tempfile.TemporaryDirectory() as folder:  # nothing is known of an earlier run
            rows.append(run_ranks(__file__, 3, words, timeout_s=600, environment={"XDG_CACHE_HOME": folder}))
    return rows


def show(rank: int) -> None:
    engine = current_engine()
    assert engine is not None
    traces = engine.executor.traces
    begin = traces[0].start_ns if traces else 0
    words = [
        f"{item.kind}{item.micro_batch}:{(item.start_ns - begin) / 1e6:.0f}-{(item.end_ns - begin) / 1e6:.0f}"
        for item in traces
    ]
    print(f"rank {rank}", *words, flush=True)


def bound_of(paces: list[Pace]) -> float:
    """Seconds of the step that has just run, with the times that layers sleep."""
    engine = current_engine()
    assert engine is not None and engine.last_step is not None
    schedule = engine.last_step.schedule
    tasks = []
    for task in schedule.tasks:
        pace = paces[min(task.level, 1)]
        seconds = {
            Kind.FORWARD: pace.forward,
            Kind.BACKWARD: pace.input + pace.weight,
            Kind.WEIGHT: 0.0,
        }[task.kind]
        tasks.append(dataclasses.replace(task, duration=seconds))
    return simulate(Schedule(tasks=tuple(tasks), orders=schedule.orders)).step_time


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES, "found"], choices=[*SHAPES, "found"])
    parser.add_argument("--stages", default="wide", help="of a worker whose plan is found")
    parser.add_argument("--shape", default="2-1", help="of a worker")
    parser.add_argument("--unit", type=float, default=100.0, help="milliseconds of a forward of one unit")
    parser.add_argument("--micro-batches", type=int, default=12)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--reduction", default="exact", choices=["exact", "sum"])
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    if args.worker:
        (found_worker if args.shape == "found" else worker)(args)
        return
    shapes = ["2-1"] if args.quick else args.shapes
    rows: list[dict[str, Any]] = []
    figures: list[str] = []
    is_near = is_faster = True
    for shape in shapes:
        if shape == "found":
            rows += measure_found(args)
            gain = rows[-1]["step_s"] / rows[-2]["step_s"]
            figures.append(f"found {'-'.join(rows[-2]['plan'])}, {gain:.2f} x the plan found without width")
            print(f"{figures[-1]} ({rows[-2]['step_s']:.3f} s, {rows[-1]['step_s']:.3f} s)", flush=True)
            is_faster = is_faster and gain > 1.0
            continue
        words = ["--shape", shape, "--unit", str(args.unit), "--micro-batches", str(args.micro_batches)]
        words += ["--turns", str(args.turns), "--schedule", args.schedule, "--reduction", args.reduction]
        words += ["--verbose"] if args.verbose else []
        rows += run_ranks(__file__, sum(widths_of(shape)), words, timeout_s=1000)
        wide, narrow = rows[-2:]
        to_bound, gain = wide["step_s"] / wide["bound_s"], narrow["step_s"] / wide["step_s"]
        figures.append(f"{shape} {to_bound:.3f} of the bound, {gain:.2f} x the best plan without width")
        print(f"{figures[-1]} ({wide['bound_s']:.3f} s, {wide['step_s']:.3f} s, {narrow['step_s']:.3f} s)", flush=True)
        is_near, is_faster = is_near and to_bound <= BAR, is_faster and gain > 1.0
    finish(args, rows=rows, figure="; ".join(figures), holds=is_near and is_faster)


if __name__ == "__main__":
    main()
