"""The shortest of many list schedules within a given memory, made shorter by exchanging neighbours.

Tried are several shares of the memory for forwards whose backward has not come back, each growing with a rank's depth
(the rest is for deferred weight gradients), several degrees of patience, forwards before and after backwards.
Some dozen simulations of a step and some hundred exchanges: a few seconds for 8 ranks and 32 micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from benchmarks.bubble_rates.schedules.improve import improve

from farspan.schedule.limits import Limits, depths
from farspan.schedule.listing import Simulation
from farspan.schedule.schedule import Schedule
from farspan.schedule.task import Task

__all__ = ["automatic"]

_IN_FLIGHT_PER_DEPTH = (1.0, 1.25, 1.5, 1.75, 2.0, 2.25)
_PATIENCES = (0.0, 0.25, 0.5, 0.75, 1.0)


def automatic(tasks: Sequence[Task], *, memory: Sequence[float], latency: float = 0.0) -> Schedule:
    """The shortest schedule that was found: by the longest span from a rank's first task to its last.

    Args:
        tasks: All tasks of the step; each needs only tasks before it.
        memory: The most that each rank may hold, in the unit of `Task.memory`.
        latency: From the end of a task to when another rank has what it made, in the unit of the durations.

    Raises:
        PlanError: The memory does not do.
    """
    best: Simulation | None = None
    for in_flight, patience, forwards_first in itertools.product(
        _profiles(tasks, len(memory)), _PATIENCES, (False, True)
    ):
        limits = [Limits(in_flight=count, memory=limit) for count, limit in zip(in_flight, memory, strict=True)]
        simulation = Simulation(tasks, limits, latency, patience=patience, forwards_first=forwards_first)
        simulation.run()
        if best is None or simulation.cost < best.cost:
            best = simulation
    assert best is not None
    orders = improve(tasks, best.orders, memory=memory, latency=latency)
    return Schedule(tasks=tuple(tasks), orders=tuple(map(tuple, orders)))


def _profiles(tasks: Sequence[Task], num_ranks: int) -> list[tuple[int, ...]]:
    """How many micro-batches each rank may have in flight: the ways to try."""
    deep = depths(tasks, num_ranks)
    found = [tuple(max(1, round(factor * depth)) for depth in deep) for factor in _IN_FLIGHT_PER_DEPTH]
    return list(dict.fromkeys(found))
