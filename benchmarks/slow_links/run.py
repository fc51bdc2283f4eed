"""Step times where links are slow, against torch.distributed.pipelining's 1F1B.

Four hosts, boundary tensors of 1 to 16 MiB. Hosts are network namespaces, each with one wire whose rate is such that a
boundary tensor takes 0.3 of a stage's forward; stages sleep, so that all fit on a few cores. Both sides run the same
layers on the same hosts over gloo and take turns in one launch; a step is forward and backward of all micro-batches,
from a barrier to when the last rank has ended. With --one-host the ranks share this host's memory instead, and nothing
is limited.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.common import arguments, finish, machine, run_ranks  # noqa: E402
from benchmarks.schedule_efficiency.devices import WIDTH, layers_of  # noqa: E402
from benchmarks.schedule_efficiency.run import FarspanSide, TorchSide, take_turns  # noqa: E402
from benchmarks.slow_links.hosts import Hosts, hosts, why_not  # noqa: E402
from benchmarks.vs_torch_pipelining.run import spans, untouched_torch  # noqa: E402

from farspan.execute.process.world import current_engine  # noqa: E402
from farspan.planner import Link, own_links, simulate  # noqa: E402
from farspan.schedule import Kind, Schedule  # noqa: E402

BAR = 0.85
NUM_HOSTS, NUM_MICRO_BATCHES = 4, 8
SHARE = 0.3
"""Of a stage's forward, that its output takes on the wire."""
UNITS_S = {1: 0.1, 4: 0.2, 16: 0.4}
"""Seconds of a stage's forward, by the MiB of its output: both sides' host work should weigh little."""
SCHEDULES = ("1f1b", "auto", "zero-bubble")
PAYLOAD = 1448 / 1514
"""Of the bytes that a wire of limited rate counts: the rest is headers."""


def worker(args: Any) -> None:
    """One rank: both sides in turns; rank 0 writes the rows."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), args.sizes[0]
    dist.init_process_group("gloo")
    paces = layers_of(NUM_HOSTS, UNITS_S[size] / 2, is_equal=True)
    ours = {name: FarspanSide("straight", name, NUM_HOSTS, paces, NUM_MICRO_BATCHES) for name in SCHEDULES}
    with untouched_torch():
        theirs = TorchSide("straight", rank, NUM_HOSTS, paces, NUM_MICRO_BATCHES)
    x = torch.randn(NUM_MICRO_BATCHES * (size << 18) // WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
    schedules: dict[str, Schedule] = {}
    taken: dict[str, list[list[float]]] = {name: [] for name in ours}

    def note(name: str, side: FarspanSide) -> None:
        engine = current_engine()
        assert engine is not None and engine.last_training_step is not None
        schedules[name] = engine.last_training_step.schedule
        traces = [trace for trace in engine.last_training_step.traces if trace.kind != "wait"]
        taken[name].append([(trace.end_ns - trace.start_ns) / 1e9 for trace in traces])

    times = take_turns(rank, theirs, ours, x, args.turns, note)
    everyone: list[Any] = [None] * NUM_HOSTS
    with untouched_torch():
        dist.all_gather_object(everyone, {"times": times, "taken": taken})
    if rank == 0:
        steps = {name: spans([part["times"][name] for part in everyone]) for name in times}
        simulated = {
            name: simulated_s(
                schedules[name], [part["taken"][name][1:] for part in everyone], size, is_limited=not args.one_host
            )
            for name in SCHEDULES
        }
        Path(args.worker).write_text(json.dumps(rows_of(size, steps, simulated, is_limited=not args.one_host)))
    dist.barrier()


def simulated_s(schedule: Schedule, taken: list[list[list[float]]], size: int, *, is_limited: bool) -> float:
    """The step of the orders that ran; each task takes what is usual for its kind on its rank.

    Args:
        schedule: The orders.
        taken: By rank and turn, the seconds of its tasks in their order.
        size: MiB of each message.
        is_limited: Whether a host's wire carries all that goes out of it, at the rate that it has.
    """
    split = {(task.level, task.micro_batch) for task in schedule.tasks if task.kind is Kind.WEIGHT}
    kinds = [(task.kind, (task.level, task.micro_batch) in split) for task in schedule.tasks]
    tasks = list(schedule.tasks)
    for order, turns in zip(schedule.orders, taken, strict=True):
        seconds: dict[Any, list[float]] = defaultdict(list)
        for turn in turns:
            for index, each in zip(order, turn, strict=True):
                seconds[kinds[index]].append(each)
        for index in order:
            tasks[index] = replace(
                tasks[index],
                duration=median(seconds[kinds[index]]),
                output_bytes=tuple((rank, float(size << 20)) for rank in range(len(schedule.orders))),
            )
    bandwidth = PAYLOAD * rate_of(size)
    simulated = simulate(
        Schedule(tasks=tuple(tasks), orders=schedule.orders),
        link_of=(lambda source, destination: Link(name=f"out of {source}", bandwidth=bandwidth))
        if is_limited
        else own_links(),
    )
    return simulated.step_time


def rate_of(size: int) -> float:
    """Bytes per second of a host's wire."""
    return (size << 20) / (SHARE * UNITS_S[size])


def rows_of(
    size: int, steps: dict[str, list[float]], simulated: dict[str, float], *, is_limited: bool
) -> list[dict[str, Any]]:
    torch_s = median(steps["torch"])
    return [
        {
            "mib": size,
            "links": "limited" if is_limited else "memory",
            "schedule": name,
            "farspan_s": median(steps[name]),
            "torch_s": torch_s,
            "to_torch": median(steps[name]) / torch_s,
            "simulated_s": simulated[name],
            "to_simulated": median(steps[name]) / simulated[name],
            "steps_s": {"farspan": steps[name], "torch": steps["torch"]},
        }
        for name in simulated
    ]


def measure(size: int, args: Any) -> list[dict[str, Any]]:
    words = ["--sizes", str(size), "--turns", str(args.turns)]
    if args.one_host:
        return run_ranks(__file__, NUM_HOSTS, [*words, "--one-host"], timeout_s=1800)
    with hosts(NUM_HOSTS, bytes_per_s=rate_of(size)) as made:
        return run_ranks(__file__, NUM_HOSTS, words, timeout_s=1800, **environment_of(made))


def environment_of(made: Hosts) -> dict[str, Any]:
    """How ranks are started on hosts, and find each other."""
    found = {"MASTER_ADDR": made.addresses[0], "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
    return {"prefix_of": made.command, "environment": found}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", choices=UNITS_S, help="MiB; all, or 1 with --quick")
    parser.add_argument("--turns", type=int, help="of each side; 3, or 1 with --quick")
    parser.add_argument("--one-host", action="store_true", help="no limit, through this host's memory")
    args = parser.parse_args()
    args.sizes = args.sizes or ([1] if args.quick else list(UNITS_S))
    args.turns = args.turns or (1 if args.quick else 3)
    if args.worker:
        worker(args)
        return
    reason = "" if args.one_host else why_not()
    if reason:
        print(machine())
        print(f"skipped: {reason}")
        return
    rows = [row for size in args.sizes for row in measure(size, args)]
    print("  MiB  links    schedule      farspan      torch  / torch  / simulated")
    for row in rows:
        print(
            f"{row['mib']:5d}  {row['links']:7s}  {row['schedule']:11s}  {row['farspan_s']:7.3f} s  "
            f"{row['torch_s']:7.3f} s  {row['to_torch']:7.3f}  {row['to_simulated']:11.3f}"
        )
    worst = {name: max(row["to_torch"] for row in rows if row["schedule"] == name) for name in SCHEDULES}
    figure = ", ".join(f"{name} {ratio:.3f}" for name, ratio in worst.items())
    holds = worst["auto"] <= BAR
    finish(args, rows=rows, figure=f"step / torch 1F1B at most: {figure} (bar {BAR:.2f} for auto)", holds=holds)


if __name__ == "__main__":
    main()
