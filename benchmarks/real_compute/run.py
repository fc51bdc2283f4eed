"""Real compute: a GPT over two processes against torch.distributed.pipelining's 1F1B, and against one process.

Two processes of one thread each. In turns run: the plain loop in one of them while the other waits; the plain loop in
both at once, each with half of the micro-batches (what two cores of this machine give at most); torch's 1F1B; farspan
under each schedule. A step is zero_grad, forward and backward of all micro-batches, and AdamW.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from benchmarks.common import arguments, finish, run_ranks  # noqa: E402
from benchmarks.vs_torch_pipelining.run import (  # noqa: E402
    LEARNING_RATE,
    FarspanSide,
    TorchSide,
    batch_of,
    build,
    loss_of,
    spans,
    untouched_torch,
)

from farspan.execute.process.world import current_engine  # noqa: E402
from farspan.planner import simulate  # noqa: E402
from farspan.schedule import LEAST_WEIGHT_WORK_S, Schedule  # noqa: E402

BAR_TORCH, BAR_SPEED_UP = 0.97, 0.95
NUM_MICRO_BATCHES = 16
SCHEDULES = ("1f1b", "auto", "zero-bubble")
PLAIN = ("plain", "plain, both")


class Plain:
    """The loop without farspan."""

    def __init__(self) -> None:
        self.model = build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def step(self, x: Tensor, y: Tensor, num_micro_batches: int) -> None:
        self.optimizer.zero_grad()
        for part_x, part_y in zip(x.chunk(num_micro_batches), y.chunk(num_micro_batches), strict=True):
            (loss_of(self.model(part_x), part_y) / num_micro_batches).backward()
        self.optimizer.step()


class Rank:
    """All that takes turns in one process."""

    def __init__(self, rank: int, batch: int) -> None:
        self.rank, self.batch = rank, batch
        self.ours = FarspanSide(NUM_MICRO_BATCHES)
        with untouched_torch():
            self.plain, self.theirs = Plain(), TorchSide(rank, NUM_MICRO_BATCHES)
        self.simulated: dict[str, list[tuple[Schedule, list[tuple[str, float]]]]] = {name: [] for name in SCHEDULES}

    def run(self, name: str, number: int) -> tuple[int, int]:
        """One step; when it began and ended here."""
        x, y = batch_of(number, NUM_MICRO_BATCHES, self.batch)
        if name in SCHEDULES:
            return self._run_farspan(name, x, y)
        with untouched_torch():
            dist.barrier()
            began = time.perf_counter_ns()
            if name == "torch":
                self.theirs.step(x, y)
            elif name == "plain" and self.rank == 0:
                self.plain.step(x, y, NUM_MICRO_BATCHES)
            elif name == "plain, both":
                half = len(x) // 2
                self.plain.step(x[:half], y[:half], NUM_MICRO_BATCHES // 2)
            return began, time.perf_counter_ns()

    def _run_farspan(self, name: str, x: Tensor, y: Tensor) -> tuple[int, int]:
        engine = current_engine()
        assert engine is not None
        engine.schedule, engine.least_weight_work_s = name, LEAST_WEIGHT_WORK_S[name]
        dist.barrier()
        began = time.perf_counter_ns()
        self.ours.step(x, y)
        ended = time.perf_counter_ns()
        record = engine.last_training_step
        assert record is not None
        tasks = [item for item in record.traces if item.kind != "wait"]
        durations = [(item.kind, (item.end_ns - item.start_ns) / 1e9) for item in tasks]
        self.simulated[name].append((record.schedule, durations))
        return began, ended


def worker(args: Any) -> None:
    """One rank; rank 0 writes the rows."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    here = Rank(rank, args.batch)
    names = [*PLAIN, "torch", *SCHEDULES]
    times: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    for turn in range(args.turns + 1):  # the first one warms up
        for name in names if turn % 2 else names[::-1]:
            found = [here.run(name, turn * args.steps + i) for i in range(args.steps)]
            if turn:
                times[name] += found
    everyone: list[Any] = [None, None]
    durations = {name: [times for _, times in steps[args.steps :]] for name, steps in here.simulated.items()}
    with untouched_torch():
        dist.all_gather_object(everyone, {"times": times, "durations": durations})
    if rank == 0:
        step_s = {name: spans([part["times"][name] for part in everyone]) for name in names}
        bubbles = {
            name: fmean(
                bubble_of(schedule, [part["durations"][name][number] for part in everyone])
                for number, (schedule, _) in enumerate(here.simulated[name][args.steps :])
            )
            for name in SCHEDULES
        }
        Path(args.worker).write_text(json.dumps({"steps_s": step_s, "bubbles": bubbles}))
    dist.barrier()


def bubble_of(schedule: Schedule, by_rank: list[list[tuple[str, float]]]) -> float:
    """The share of the ranks' time that the order leaves idle, if every task takes as long as its like did."""
    tasks = list(schedule.tasks)
    for order, durations in zip(schedule.orders, by_rank, strict=True):
        if [tasks[index].kind.value for index in order] != [kind for kind, _ in durations]:
            raise AssertionError("another order has run than was planned")
        like: dict[Any, list[int]] = {}
        for place, index in enumerate(order):
            like.setdefault((tasks[index].kind, tasks[index].level), []).append(place)
        for places in like.values():
            mean = fmean(durations[place][1] for place in places)
            for place in places:
                tasks[order[place]] = replace(tasks[order[place]], duration=mean)
    simulated = simulate(Schedule(tasks=tuple(tasks), orders=schedule.orders))
    return 1.0 - sum(task.duration for task in tasks) / (2 * simulated.step_time)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--turns", type=int, help="of each side; 8, or 2 with --quick")
    parser.add_argument("--steps", type=int, help="in a turn; 2, or 1 with --quick")
    parser.add_argument("--batch", type=int, default=4, help="sequences per micro-batch")
    args = parser.parse_args()
    args.turns = args.turns or (2 if args.quick else 8)
    args.steps = args.steps or (1 if args.quick else 2)
    if args.worker:
        worker(args)
        return
    words = ["--turns", str(args.turns), "--steps", str(args.steps), "--batch", str(args.batch)]
    found = run_ranks(__file__, 2, words, timeout_s=300 if args.quick else 3000)
    step_s = {name: median(values) for name, values in found["steps_s"].items()}
    scaling = step_s["plain"] / step_s["plain, both"]
    print(f"one process {step_s['plain'] * 1e3:.0f} ms; two at once do the same work {scaling:.3f} times as fast")
    print("              step   / torch 1F1B   speed-up   bubble   allowed   speed-up / allowed")
    rows: list[dict[str, Any]] = []
    for name in ("torch", *SCHEDULES):
        bubble = found["bubbles"].get(name)
        row: dict[str, Any] = {
            "side": name,
            "step_s": step_s[name],
            "to_torch": step_s[name] / step_s["torch"],
            "speed_up": step_s["plain"] / step_s[name],
            "bubble": bubble,
            "scaling": scaling,
        }
        text = f"{name:12s} {row['step_s'] * 1e3:5.0f} ms   {row['to_torch']:8.3f}   {row['speed_up']:10.3f}"
        if bubble is not None:
            row["allowed"] = scaling * (1.0 - bubble)
            row["to_allowed"] = row["speed_up"] / row["allowed"]
            text += f"   {bubble:6.3f}   {row['allowed']:7.3f}   {row['to_allowed']:8.3f}"
        print(text)
        rows.append({**row, "steps_s": found["steps_s"][name]})
    same = rows[1]
    best = max(rows[1:], key=lambda row: row["speed_up"])
    figure = (
        f"1f1b / torch 1F1B {same['to_torch']:.3f} (bar {BAR_TORCH:.2f}); {best['side']}: "
        f"{best['to_allowed']:.3f} of what its bubble allows (bar {BAR_SPEED_UP:.2f})"
    )
    holds = same["to_torch"] <= BAR_TORCH and best["to_allowed"] >= BAR_SPEED_UP
    finish(args, rows=rows, figure=figure, holds=holds)


if __name__ == "__main__":
    main()
