"""A rank becomes slow while a program trains: samples a second before, with it, after the model has been repartitioned.

Each rank is a process whose layers sleep, as in `schedule_efficiency`. After some steps the layers of one rank take
several times as long. farspan gets no hint: it measures, and repartitions the model. Later the rank recovers.

The bound is the planner's, for devices of those speeds and messages that take none: no step of that many micro-batches
is shorter, however the layers are cut and scheduled.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from argparse import BooleanOptionalAction
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.common import arguments, finish, run_ranks  # noqa: E402
from benchmarks.planner_real.run import cluster_of  # noqa: E402
from benchmarks.schedule_efficiency.devices import WIDTH, Model, Pace  # noqa: E402

import farspan  # noqa: E402
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode  # noqa: E402
from farspan.planner.optimize import best_plan  # noqa: E402

BAR = 1.10
_ROWS = 4
"""Samples of a micro-batch."""
_NUM_BEFORE, _NUM_AFTER = 14, 8
"""Steps: farspan learns in the first what is usual."""


def plan_text(model: torch.nn.Module) -> list[int]:
    """How many layers each rank has."""
    plan = farspan.plan_of(model)
    ranks = [plan.rank_of(plan.placement[f"layers.{number}"]) for number in range(len(model.layers))]  # type: ignore[arg-type]
    return [ranks.count(rank) for rank in range(plan.num_stages)]


def pace_of(args: Any, factor: float) -> Pace:
    unit_s = args.unit / 1e3 * factor
    return Pace(forward=unit_s, input=unit_s, weight=unit_s)


def worker(args: Any) -> None:
    """One rank: steps until all phases are over; every rank decides by the plan, which is the same."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")  # for barriers
    model = farspan.distribute(Model([pace_of(args, 1.0)] * args.layers), measure=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(args.micro_batches * _ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    rows: list[dict[str, Any]] = []

    def step(phase: str) -> None:
        dist.barrier()
        began = time.perf_counter()
        losses = []
        for part in x.chunk(args.micro_batches):
            loss = model(part).square().mean() / args.micro_batches
            loss.backward()
            losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
        values = [loss.item() for loss in losses]
        dist.barrier()
        seconds = time.perf_counter() - began
        rows.append({"phase": phase, "step_s": seconds, "layers": plan_text(model), "losses": values})

    def until_moved(phase: str) -> None:
        before = plan_text(model)
        for _ in range(args.most_steps):
            step(phase)
            if plan_text(model) != before:
                return

    def set_factor(factor: float) -> None:
        for layer in model.layers:
            layer.pace = pace_of(args, factor if rank == args.rank else 1.0)  # type: ignore[union-attr, assignment]

    for _ in range(_NUM_BEFORE):
        step("before")
    set_factor(args.factor)
    until_moved("straggler")
    for _ in range(_NUM_AFTER):
        step("after")
    if args.recover:
        set_factor(1.0)
        until_moved("recovered")
        for _ in range(_NUM_AFTER):
            step("planned back")
    if rank == 0:
        Path(args.worker).write_text(json.dumps(rows))
    dist.barrier()


def plain_losses(args: Any, num_steps: int) -> list[list[float]]:
    """Those of the program in one process, which does not sleep."""
    model = Model([pace_of(args, 0.0)] * args.layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(args.micro_batches * _ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    found: list[list[float]] = []
    for _ in range(num_steps):
        losses = []
        for part in x.chunk(args.micro_batches):
            loss = model(part).square().mean() / args.micro_batches
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        found.append(losses)
    return found


def bound_of(args: Any, speeds: Sequence[float]) -> tuple[float, float]:
    """Seconds of the planner's bound for ranks of those speeds, and of the best plan that it finds."""
    pace = pace_of(args, 1.0)
    names = [f"layers.{number}" for number in range(args.layers)]
    graph = CostedGraph(
        nodes=tuple(
            CostedNode(
                name=name,
                forward_s=pace.forward,
                backward_s=pace.input + pace.weight,
                weight_s=pace.weight,
                parameter_bytes=1.0,
                saved_bytes=1.0,
                memory_bytes=1.0,
            )
            for name in names
        ),
        edges=tuple(CostedEdge(source=one, target=other, size_bytes=0.0) for one, other in pairwise(names)),
        source="layers that sleep",
    )
    found = best_plan(graph, cluster_of(speeds), args.micro_batches)
    return found.bound, found.best.step_s


def measure(args: Any) -> list[dict[str, Any]]:
    words = ["--ranks", args.ranks, "--layers", args.layers, "--rank", args.rank, "--factor", args.factor]
    words += ["--unit", args.unit, "--micro-batches", args.micro_batches, "--most-steps", args.most_steps]
    words += ["--recover" if args.recover else "--no-recover"]
    with tempfile.TemporaryDirectory() as folder:  # nothing is known of an earlier run
        environment = {"XDG_CACHE_HOME": folder, "FARSPAN_STRAGGLER": str(args.hold)}
        rows: list[dict[str, Any]] = run_ranks(
            __file__, args.ranks, list(map(str, words)), timeout_s=900, environment=environment
        )
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rank", type=int, default=2, help="that becomes slow")
    parser.add_argument("--factor", type=float, default=2.3, help="how many times as long its layers then take")
    parser.add_argument("--unit", type=float, help="milliseconds of a third of a layer; 10, or 4 with --quick")
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--hold", type=float, help="FARSPAN_STRAGGLER; 30, or 2 with --quick")
    parser.add_argument("--most-steps", type=int, default=100, help="until the model is repartitioned")
    parser.add_argument("--recover", action=BooleanOptionalAction, default=True, help="the rank recovers in the end")
    args = parser.parse_args()
    args.unit = args.unit or (4.0 if args.quick else 10.0)
    args.hold = args.hold or (2.0 if args.quick else 30.0)
    if args.worker:
        worker(args)
        return
    rows = measure(args)
    speeds = [1.0] * args.ranks
    slowed = [1 / args.factor if rank == args.rank else 1.0 for rank in range(args.ranks)]
    bounds = {True: bound_of(args, slowed), False: bound_of(args, speeds)}
    table: list[dict[str, Any]] = []
    for phase in dict.fromkeys(row["phase"] for row in rows):
        own = [row for row in rows if row["phase"] == phase]
        settled = own[1:]  # the first one has other orders, or a search in it
        bound_s, best_s = bounds[phase in ("straggler", "after")]
        step_s = median(row["step_s"] for row in (settled[:-1] if phase in ("straggler", "recovered") else settled))
        table.append(
            {
                "phase": phase,
                "layers": settled[0]["layers"],
                "steps": len(own),
                "seconds": sum(row["step_s"] for row in own),
                "step_s": step_s,
                "samples_per_s": args.micro_batches * _ROWS / step_s,
                "bound_s": bound_s,
                "best_plan_s": best_s,
            }
        )
    show(table)
    of = {row["phase"]: row for row in table}
    is_exact = [row["losses"] for row in rows] == plain_losses(args, len(rows))
    over = of["after"]["step_s"] / of["after"]["bound_s"]
    gain = of["after"]["samples_per_s"] / of["straggler"]["samples_per_s"]
    figure = (
        f"step after the model was repartitioned / planner's bound {over:.3f} (bar {BAR}), {gain:.2f} x the samples/s "
        f"with the straggler, after {of['straggler']['seconds']:.1f} s; losses "
        f"{'equal to the last bit' if is_exact else 'DIFFER'}"
    )
    holds = over <= BAR and gain > 1 and is_exact
    if args.recover:
        holds = holds and of["planned back"]["step_s"] <= BAR * of["before"]["step_s"]
    finish(args, rows=table, figure=figure, holds=holds)


def show(table: Sequence[dict[str, Any]]) -> None:
    print(f"{'':14s}  layers         steps  seconds    step   samples/s   bound  best plan  step / bound")
    for row in table:
        layers = "-".join(map(str, row["layers"]))
        print(
            f"{row['phase']:14s}  {layers:12s}  {row['steps']:5d}  {row['seconds']:7.1f}  {row['step_s']:.3f} s  "
            f"{row['samples_per_s']:7.1f}  {row['bound_s']:.3f} s  {row['best_plan_s']:.3f} s  "
            f"{row['step_s'] / row['bound_s']:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
