"""Orders of list schedules, with limits as those of 1F1B."""

from __future__ import annotations

import math
from collections.abc import Sequence

from farspan.schedule import Kind, Limits, Task, in_flight_of_1f1b
from farspan.schedule.listing import Simulation


def list_schedule(
    tasks: Sequence[Task],
    num_ranks: int,
    *,
    limits: Sequence[Limits] | None = None,
    run_ahead: int = 0,
    latency: float = 0.0,
) -> list[list[int]]:
    """The order of each rank's tasks; by default as many micro-batches are in flight as in 1F1B."""
    if limits is None:
        limits = [Limits(in_flight=count) for count in in_flight_of_1f1b(tasks, num_ranks, run_ahead=run_ahead)]
    simulation = Simulation(tasks, limits, latency)
    simulation.run()
    return simulation.orders


def limits_of_chain(tasks: Sequence[Task], num_ranks: int, *, run_ahead: int = 0) -> list[Limits]:
    """The limits of a plain pipeline: where weight gradients are tasks of their own, each rank holds as many
    micro-batches as the deepest one may have in flight."""
    counts = in_flight_of_1f1b(tasks, num_ranks, run_ahead=run_ahead)
    is_split = any(task.kind is Kind.WEIGHT for task in tasks)
    return [Limits(in_flight=count, memory=max(counts) if is_split else math.inf) for count in counts]
