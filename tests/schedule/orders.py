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
    """The order of each rank's tasks; by default as many micro-batches are in flight as in 1F1B, and where weight
    gradients are tasks of their own each rank holds as many as the deepest one may have in flight."""
    if limits is None:
        counts = in_flight_of_1f1b(tasks, num_ranks, run_ahead=run_ahead)
        memory = max(counts) if any(task.kind is Kind.WEIGHT and task.memory for task in tasks) else math.inf
        limits = [Limits(in_flight=count, memory=memory) for count in counts]
    simulation = Simulation(tasks, limits, latency)
    simulation.run()
    return simulation.orders
