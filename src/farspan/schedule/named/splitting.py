"""Chooses the micro-batches whose backwards are split under "auto": the last ones, or all.

    all split      rank 0   F0 F1 F2 B0 F3 B1 W0 B2 W1 B3 W2 W3          each W costs a little besides
    the last two   rank 0   F0 F1 F2 BW0 F3 BW1 B2 .. W2 B3 W3

Gradients of weights fill the gaps at the end of a step, where a rank waits for one gradient after the other: a few
micro-batches are enough for that. Where ranks are many and micro-batches few, there are gaps all along.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from farspan.schedule.named.recorded import orders_by_name
from farspan.schedule.named.split_rule import SPLIT_COST_S
from farspan.schedule.task import Kind, Task
from farspan.schedule.timing import simulate_orders

__all__ = ["split_from", "whole_until"]


def split_from(schedule: str, tasks: Sequence[Task], num_ranks: int, *, run_ahead: int) -> int:
    """Returns the first micro-batch whose backwards are to be split.

    Args:
        schedule: The name of the order.
        tasks: All tasks of the step, of nominal durations, with all backwards split that are worth it.
        num_ranks: Ranks are 0 .. num_ranks - 1.
        run_ahead: As for `orders_by_name`.
    """
    if schedule != "auto" or all(task.kind is not Kind.WEIGHT for task in tasks):
        return 0

    def seconds(first: int) -> float:
        fewer = whole_until(tasks, first)
        orders = orders_by_name(schedule, fewer, num_ranks, run_ahead=run_ahead)
        costs = {Kind.WEIGHT: SPLIT_COST_S}
        simulated = simulate_orders(
            [replace(task, duration=task.duration + costs.get(task.kind, 0.0)) for task in fewer], orders, 0.0
        )
        return math.inf if simulated is None else max(simulated.ends)

    num_micro_batches = 1 + max(task.micro_batch for task in tasks)
    return min((max(0, num_micro_batches - num_ranks), 0), key=seconds)


def whole_until(tasks: Sequence[Task], first: int) -> tuple[Task, ...]:
    """Returns the same step with unsplit backwards for the micro-batches before `first`.

    >>> backward = Task(kind=Kind.BACKWARD, rank=0, micro_batch=0, level=0, duration=2.0, needs=(), holds=False)
    >>> weight = replace(backward, kind=Kind.WEIGHT, duration=1.0, needs=(0,))
    >>> [(task.kind.value, task.duration) for task in whole_until([backward, weight], 1)]
    [('B', 3.0)]
    """
    if not first:
        return tuple(tasks)
    place: list[int] = []
    found: list[Task] = []
    for task in tasks:
        if task.kind is Kind.WEIGHT and task.micro_batch < first:
            own = max(place[need] for need in task.needs if _is_own(found[place[need]], task))
            place.append(own)
            backward = found[own]
            found[own] = replace(
                backward,
                duration=backward.duration + task.duration,
                memory=backward.memory + task.memory,
                needs=tuple(
                    dict.fromkeys([*backward.needs, *(place[need] for need in task.needs if place[need] < own)])
                ),
            )
            continue
        place.append(len(found))
        found.append(replace(task, needs=tuple(dict.fromkeys(place[need] for need in task.needs))))
    return tuple(found)


def _is_own(backward: Task, weight: Task) -> bool:
    """Returns whether `backward`, which `weight` needs, is its own backward."""
    same = (backward.rank, backward.level, backward.micro_batch) == (weight.rank, weight.level, weight.micro_batch)
    return same and backward.kind is Kind.BACKWARD
