"""Schedules by name for any graph of segments: what a plan asks for, as priorities and limits of the list scheduler.

    name          split backwards     order
    gpipe         none                all forwards, then all backwards
    1f1b          none                one forward, one backward; interleaved where a rank has several stages
    zero-bubble   all that others     weight gradients fill the gaps
                  wait for
    auto          where it pays       the shortest of the two before

The orders are made for nominal durations (a forward as long as input gradients, as long as weight gradients), not for
those of the stages at hand: on a plain pipeline they are GPipe, 1F1B, interleaved 1F1B, and as short as
ZB-H1 and ZB-V. Ranks that differ keep such an order better than one that is made to fit their durations.

Memory is counted in `Task.memory`. In 1F1B a rank holds, of each of its segments, as many micro-batches as there are
ranks from there to the last, or less if they are interleaved; zero-bubble holds as much on every rank as the fullest
one does then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from farspan.schedule.limits import Limits, hops_after, in_flight_of_1f1b, together_in
from farspan.schedule.listing import Simulation
from farspan.schedule.named.drawn import drawn_orders
from farspan.schedule.named.split_rule import LOOKAHEAD
from farspan.schedule.task import Kind, Task

__all__ = ["LEAST_WEIGHT_WORK_S", "SCHEDULES", "orders_by_name", "run_ahead_of"]

_Orders = list[list[int]]


def orders_by_name(name: str, tasks: Sequence[Task], num_ranks: int, *, run_ahead: int = 0) -> _Orders:
    """Returns for each rank the indices of its tasks, in the order of the schedule called `name`.

    Args:
        name: One of `SCHEDULES`, or that of an order drawn at random (`drawn_name`).
        tasks: All tasks of the step; each needs only tasks before it. Which backwards are split has been decided.
        num_ranks: Ranks are 0 .. num_ranks - 1.
        run_ahead: How many micro-batches more than it needs zero-bubble may have in flight: memory for latency. GPipe
            and 1F1B do not run ahead.
    """
    drawn = drawn_orders(name, tasks, num_ranks)
    return _BY_NAME[name].orders(tasks, num_ranks, run_ahead) if drawn is None else drawn


def _gpipe(tasks: Sequence[Task], num_ranks: int, run_ahead: int) -> _Orders:
    del run_ahead
    simulation = _finished(Simulation(tasks, [Limits(in_flight=len(tasks))] * num_ranks, 0.0, forwards_first=True))
    # No forward needs a backward, so they can all go first where one came late.
    return [sorted(order, key=lambda index: tasks[index].kind is not Kind.FORWARD) for order in simulation.orders]


def _one_f_one_b(tasks: Sequence[Task], num_ranks: int, run_ahead: int) -> _Orders:
    del run_ahead
    return _shortest(_candidates_of_1f1b(tasks, num_ranks)).orders


def _zero_bubble(tasks: Sequence[Task], num_ranks: int, run_ahead: int) -> _Orders:
    return _shortest(_candidates_of_zero_bubble(tasks, num_ranks, run_ahead)).orders


def _auto(tasks: Sequence[Task], num_ranks: int, run_ahead: int) -> _Orders:
    candidates = _candidates_of_zero_bubble(tasks, num_ranks, run_ahead)
    if _is_interleaved(tasks):
        candidates += _candidates_of_1f1b(tasks, num_ranks)
    return _shortest(candidates).orders


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSchedule:
    """The decisions behind the name of a schedule.

    Attributes:
        orders: Makes the order of each rank's tasks, from the tasks of the step, the number of ranks, and how many
            micro-batches more than it needs may be in flight.
        least_weight_work_s: A backward is split if its weight gradients are likely to take so long. Splitting costs
            0.3 ms for each block of a transformer: deferring them should save more.
        runs_ahead: Whether more micro-batches than it needs may be in flight.
    """

    orders: Callable[[Sequence[Task], int, int], _Orders]
    least_weight_work_s: float = math.inf
    runs_ahead: bool = False


_BY_NAME = {
    "auto": NamedSchedule(orders=_auto, least_weight_work_s=2e-3, runs_ahead=True),
    "zero-bubble": NamedSchedule(orders=_zero_bubble, least_weight_work_s=0.0, runs_ahead=True),
    "1f1b": NamedSchedule(orders=_one_f_one_b),
    "gpipe": NamedSchedule(orders=_gpipe),
}
SCHEDULES = tuple(_BY_NAME)
"""The names that `schedule=` takes, the default first."""
LEAST_WEIGHT_WORK_S = {name: schedule.least_weight_work_s for name, schedule in _BY_NAME.items()}


def run_ahead_of(name: str, lookahead: int = LOOKAHEAD) -> int:
    """Returns how many more forwards than it needs a schedule has in flight. The rest of `lookahead` is for receives
    that are posted ahead of the task that needs them: one task, or all of `lookahead` where the schedule does not run
    ahead.
    """
    known = _BY_NAME.get(name)  # None for an order drawn at random
    return max(0, lookahead - 1) if known is not None and known.runs_ahead else 0


def _candidates_of_1f1b(tasks: Sequence[Task], num_ranks: int) -> list[Simulation]:
    """Returns simulations that take micro-batches one by one; where a rank has several segments of a micro-batch, also
    in groups, and with less memory."""
    alone = [Limits(in_flight=count) for count in in_flight_of_1f1b(tasks, num_ranks)]
    candidates = [Simulation(tasks, alone, 0.0)]
    if _is_interleaved(tasks):
        grouped = [Limits(in_flight=len(tasks), stored=size) for size in _stored_when_interleaved(tasks, num_ranks)]
        candidates.insert(0, Simulation(tasks, grouped, 0.0, patience=0.0, forwards_first=True, group=num_ranks))
        candidates += _candidates_of_zero_bubble(tasks, num_ranks, 0)
    return candidates


def _candidates_of_zero_bubble(tasks: Sequence[Task], num_ranks: int, run_ahead: int) -> list[Simulation]:
    of_one, of_1f1b = _stored(tasks, num_ranks)
    most = min(max(of_1f1b), max(*of_one, *_stored_when_interleaved(tasks, num_ranks)))
    limits = [
        Limits(in_flight=count, memory=most + run_ahead * one)
        for count, one in zip(in_flight_of_1f1b(tasks, num_ranks, run_ahead=run_ahead), of_one, strict=True)
    ]
    return [Simulation(tasks, limits, 0.0, patience=0.0, forwards_first=first) for first in (False, True)]


def _finished(simulation: Simulation) -> Simulation:
    simulation.run()
    return simulation


def _shortest(candidates: Sequence[Simulation]) -> Simulation:
    return min(map(_finished, candidates), key=lambda simulation: max(simulation.ends, default=0.0))


def _forwards(tasks: Sequence[Task]) -> dict[tuple[int, int], list[int]]:
    """Maps (rank, micro-batch) to the indices of its forwards that hold memory."""
    found: dict[tuple[int, int], list[int]] = {}
    for number, task in enumerate(tasks):
        if task.kind is Kind.FORWARD and task.memory > 0:
            found.setdefault((task.rank, task.micro_batch), []).append(number)
    return found


def _is_interleaved(tasks: Sequence[Task]) -> bool:
    """Returns whether a rank has several segments of one micro-batch."""
    return any(len(own) > 1 for own in _forwards(tasks).values())


def _stored(tasks: Sequence[Task], num_ranks: int) -> tuple[list[float], list[float]]:
    """Returns for each rank the most that it holds of one micro-batch, and of all micro-batches in 1F1B."""
    of_one, of_1f1b = [0.0] * num_ranks, [0.0] * num_ranks
    after = hops_after(tasks)
    for (rank, _), own in _forwards(tasks).items():
        of_one[rank] = max(of_one[rank], sum(tasks[number].memory for number in own))
        of_1f1b[rank] = max(of_1f1b[rank], _in_1f1b(tasks, own, after))
    return of_one, of_1f1b


def _in_1f1b(tasks: Sequence[Task], own: Sequence[int], after: Mapping[int, int]) -> float:
    """Returns what a rank holds in 1F1B whose forwards of a micro-batch are `own`."""
    return sum(tasks[number].memory * (after[number] + 1) for number in own)


def _stored_when_interleaved(tasks: Sequence[Task], num_ranks: int) -> list[float]:
    """Returns what interleaved 1F1B holds (D. Narayanan et al., 2021, arXiv 2104.04473): a group for each segment but
    the last, and of the last twice the way to the last level and back. What ranks run together is not interleaved, in
    however many segments it falls."""
    sizes = [0.0] * num_ranks
    after, together = hops_after(tasks), together_in(tasks)
    for (rank, _), own in _forwards(tasks).items():
        if tasks[own[0]].team in together:
            sizes[rank] = max(sizes[rank], _in_1f1b(tasks, own, after))
            continue
        num_forwards = (len(own) - 1) * num_ranks + 2 * min(after[number] for number in own) + 1
        sizes[rank] = max(sizes[rank], num_forwards * sum(tasks[number].memory for number in own) / len(own))
    return sizes
