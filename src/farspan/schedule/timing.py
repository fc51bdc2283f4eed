"""Computes when every task of given orders runs, if each starts as early as it can and links are never busy.

The simulator (planner.simulate) knows links; this is for making schedules, thousands of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farspan.schedule.task import Task

__all__ = ["Times", "simulate_orders"]

_NOT_YET = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The times at which the tasks of some orders run.

    Attributes:
        starts: When each task begins.
        ends: When each task ends.
        spans: Of each rank, from the start of its first task to the end of its last.
    """

    starts: list[float]
    ends: list[float]
    spans: list[float]

    @property
    def cost(self) -> float:
        return max(self.spans, default=0.0)


def simulate_orders(tasks: Sequence[Task], orders: Sequence[Sequence[int]], latency: float) -> Times | None:
    """Simulates `orders`; returns None where they wait for each other."""
    starts, ends = [0.0] * len(tasks), [_NOT_YET] * len(tasks)
    places, clocks = [0] * len(orders), [0.0] * len(orders)
    blocked: dict[int, list[int]] = {}
    num_left = len(tasks)
    ranks = list(range(len(orders)))
    while ranks:
        rank = ranks.pop()
        order = orders[rank]
        while places[rank] < len(order):
            index = order[places[rank]]
            task = tasks[index]
            start = clocks[rank]
            missing = -1
            for need in task.needs:
                end = ends[need]
                if end == _NOT_YET:
                    missing = need
                    break
                if tasks[need].rank != rank:
                    end += latency
                if end > start:
                    start = end
            if missing >= 0:
                blocked.setdefault(missing, []).append(rank)
                break
            starts[index] = start
            ends[index] = clocks[rank] = start + task.duration
            places[rank] += 1
            num_left -= 1
            if index in blocked:
                ranks += blocked.pop(index)
    if num_left:
        return None
    spans = [clocks[rank] - starts[order[0]] if order else 0.0 for rank, order in enumerate(orders)]
    return Times(starts=starts, ends=ends, spans=spans)
