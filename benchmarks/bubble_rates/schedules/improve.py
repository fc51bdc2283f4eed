"""Making a schedule shorter by exchanging neighbours, where that is what the longest rank waits for.

The longest span ends with a task that began when another ended, on its own rank or on the one it needs; that one began
for the same reason, and so on: the critical path. Only an exchange along it can make the span shorter:

    rank 0   .. .. .. .. B1                rank 0   .. .. .. B1
    rank 1   .. W0 W1 B1             =>    rank 1   .. W0 B1 W1
"""

from __future__ import annotations

from collections.abc import Sequence

from farspan.schedule.task import Kind, Task
from farspan.schedule.timing import Times, simulate_orders

__all__ = ["improve"]

_SLACK = 1e-9
_FARTHEST = 8
"""How many places a task is deferred at most."""


def improve(
    tasks: Sequence[Task],
    orders: Sequence[Sequence[int]],
    *,
    memory: Sequence[float],
    latency: float = 0.0,
    effort: int = 1_000_000,
) -> list[list[int]]:
    """Exchange tasks as long as that helps.

    Args:
        tasks: All tasks of the step.
        orders: For each rank the indices of its tasks; they can be run.
        memory: The most each rank may hold.
        latency: From the end of a task to when another rank has what it made.
        effort: How many tasks to simulation at most, over all attempts.
    """
    best = [list(order) for order in orders]
    times = simulate_orders(tasks, best, latency)
    assert times is not None
    while effort > 0:
        found = None
        score = _score(tasks, times)
        for rank, place in _exchanges(tasks, best, times, latency):
            for distance in range(1, min(_FARTHEST, len(best[rank]) - 1 - place) + 1):
                order = _put_off(best[rank], place, distance)
                if not _fits(tasks, order, memory[rank]):
                    continue
                effort -= len(tasks)
                candidate = [*best[:rank], order, *best[rank + 1 :]]
                simulated = simulate_orders(tasks, candidate, latency)
                if simulated is not None and _score(tasks, simulated) < score:
                    found = candidate, simulated
                    break
            if found or effort <= 0:
                break
        if not found:
            break
        best, times = found
    return best


def _score(tasks: Sequence[Task], times: Times) -> tuple[float, float]:
    """The longest span; among equals how early it is that forwards and backwards run, on parallel paths too."""
    early = sum(start for start, task in zip(times.starts, tasks, strict=True) if task.kind is not Kind.WEIGHT)
    return round(times.cost, 9), round(early, 6)


def _exchanges(
    tasks: Sequence[Task], orders: Sequence[Sequence[int]], times: Times, latency: float
) -> list[tuple[int, int]]:
    """Ranks and places of the tasks on critical paths that hold up their successors; latest first."""
    places = {index: place for order in orders for place, index in enumerate(order)}
    found: list[tuple[float, int, int]] = []
    seen: set[int] = set()
    ends = [orders[rank][-1] for rank, span in enumerate(times.spans) if span >= times.cost - _SLACK and orders[rank]]
    while ends:
        index = ends.pop()
        if index in seen:
            continue
        seen.add(index)
        task, place, start = tasks[index], places[index], times.starts[index] - _SLACK
        for need in task.needs:
            transfer = latency if tasks[need].rank != task.rank else 0.0
            ends += [need] if times.ends[need] + transfer >= start else []
        if place:
            before = orders[task.rank][place - 1]
            if times.ends[before] >= start:
                ends.append(before)
                if before not in task.needs:
                    found.append((times.starts[before], task.rank, place - 1))
    return [(rank, place) for _, rank, place in sorted(found, reverse=True)]


def _put_off(order: Sequence[int], place: int, distance: int) -> list[int]:
    """The order in which the task at `place` comes so many places later."""
    last = place + distance + 1
    return [*order[:place], *order[place + 1 : last], order[place], *order[last:]]


def _fits(tasks: Sequence[Task], order: Sequence[int], memory: float) -> bool:
    held = 0.0
    limit = memory * (1 + _SLACK)
    for index in order:
        change = tasks[index].memory
        held += change
        if held > limit:
            return False
    return True
