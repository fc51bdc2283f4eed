"""Limits on how much a rank may hold at once: they make a list schedule 1F1B or anything else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from farspan.schedule.task import Kind, Task

__all__ = ["Limits", "depths", "hops_after", "limits_of_1f1b", "together_in"]

_SLACK = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that a rank may hold at once.

    Attributes:
        in_flight: Micro-batches between their forward and their backward.
        held: Micro-batches between their forward and their weight gradients.
        stored: The sum of `Task.memory`, in its unit.
        memory: The same. The others give way where nothing else could run; this one never does.
    """

    in_flight: float
    held: float = math.inf
    stored: float = math.inf
    memory: float = math.inf


def limits_of_1f1b(tasks: Sequence[Task], num_ranks: int, *, run_ahead: int = 0, latency: float = 0.0) -> list[Limits]:
    """Returns limits that let a rank have as many micro-batches in flight as it is deep, and hold as many as the
    deepest rank.

    With a latency, as many more as keep all ranks busy. On links as slow as a forward:

        rank 0   F0 F1 F2 F3 F4 .. .. .. .. B0 F5 B1 .. B2 .. B3 .. B4 .. B5
        rank 1   .. .. F0 F1 F2 .. .. B0 F3 B1 F4 B2 F5 B3 .. B4 .. B5
        rank 2   .. .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

    where 1F1B would wait for each gradient:

        rank 0   F0 F1 F2 .. .. .. .. .. .. B0 F3 B1 F4 .. .. B2 F5 .. .. B3 .. B4 .. .. .. B5
        rank 1   .. .. F0 F1 .. .. .. B0 F2 B1 .. .. F3 B2 F4 .. .. B3 F5 B4 .. .. .. B5
        rank 2   .. .. .. .. F0 B0 F1 B1 .. .. F2 B2 .. .. F3 B3 F4 B4 .. .. F5 B5

    Args:
        tasks: All tasks of the step.
        num_ranks: Ranks are 0 .. num_ranks - 1.
        run_ahead: How many more than that.
        latency: From the end of a task to when another rank has what it made. While micro-batches are on their way a
            rank needs others to work on. Where ranks alternate forwards and backwards they run in step, so each hop
            there and back costs whole micro-batches: as many as the busiest rank works off in that time, rounded up.
    """
    deep = depths(tasks, num_ranks)
    extra = [run_ahead] * num_ranks
    if latency:
        extra = [run_ahead + more for more in _on_their_way(tasks, num_ranks, latency)]
    held = max(depth + more for depth, more in zip(deep, extra, strict=True))
    has_weights = {task.rank for task in tasks if task.kind is Kind.WEIGHT}
    return [
        Limits(in_flight=depth + (more if depth > 1 or rank in has_weights else 0), held=held)
        for rank, (depth, more) in enumerate(zip(deep, extra, strict=True))
    ]


def depths(tasks: Sequence[Task], num_ranks: int) -> list[int]:
    """Counts for each rank the ranks from its first task to the last task of the micro-batch, both included."""
    found = [1] * num_ranks
    for number, after in hops_after(tasks).items():
        rank = tasks[number].rank
        found[rank] = max(found[rank], after + 1)
    return found


def hops_after(tasks: Sequence[Task]) -> dict[int, int]:
    """Counts for each forward, by its index, the stages that still come after it until the last of its micro-batch.

    Stages that follow each other on one rank are one for this: they hold no micro-batch more than a single one would.
    Where data come back to a rank (a V, a loop) all count: a turn is shorter with one micro-batch more.

    Ranks that run each layer together are one here, however often they exchange what each has; but they count one more,
    for they have something to do while they wait for each other only if they are in two micro-batches.
    """
    together = together_in(tasks)
    step = int(_comes_back(tasks))
    hops: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, task in enumerate(tasks):
        if task.kind is not Kind.FORWARD:
            continue
        before = [need for need in task.needs if need in hops and tasks[need].micro_batch == task.micro_batch]
        own = _who(task)
        within = 0 if own in together else step
        hops[number] = max((hops[need] + (1 if _who(tasks[need]) != own else within) for need in before), default=0)
        last[task.micro_batch] = max(last.get(task.micro_batch, 0), hops[number])
    return {
        number: last[tasks[number].micro_batch] - its + (_who(tasks[number]) in together)
        for number, its in hops.items()
    }


def _who(task: Task) -> int:
    """Returns the number of the rank that runs a task, or of the team that runs each layer together."""
    return task.rank if task.team is None else task.team


def together_in(tasks: Sequence[Task]) -> set[int]:
    """Returns the numbers of the teams of several ranks."""
    return {task.team for task in tasks if task.team is not None and task.team != task.rank}


def _comes_back(tasks: Sequence[Task]) -> bool:
    """Returns whether some rank, or team, has two forwards of a micro-batch with another one's in between."""
    since: dict[int, set[int]] = {}
    for number, task in enumerate(tasks):
        if task.kind is not Kind.FORWARD:
            continue
        left: set[int] = set()
        for need in task.needs:
            if need in since and tasks[need].micro_batch == task.micro_batch:
                left |= since[need]
                if _who(tasks[need]) != _who(task):
                    left.add(_who(tasks[need]))
        if _who(task) in left:
            return True
        since[number] = left
    return False


def _on_their_way(tasks: Sequence[Task], num_ranks: int, latency: float) -> list[int]:
    """Returns for each rank how many more micro-batches in flight keep all ranks busy."""
    work = [0.0] * num_ranks
    for task in tasks:
        work[task.rank] += task.duration
    pace = max(work) / max(1, len({task.micro_batch for task in tasks}))
    if not pace:
        return [0] * num_ranks
    with_transfers, without = _round_trips(tasks, latency), _round_trips(tasks, 0.0)
    hops = [0] * num_ranks
    for (rank, micro_batch), trip in with_transfers.items():
        there_and_back = (trip - without[rank, micro_batch]) / (2 * latency)
        hops[rank] = max(hops[rank], math.ceil(there_and_back - _SLACK))
    return [count * math.ceil(2 * latency / pace - _SLACK) for count in hops]


def _round_trips(tasks: Sequence[Task], latency: float) -> dict[tuple[int, int], float]:
    """Maps (rank, micro-batch) to the time from its first forward to its last backward on otherwise idle ranks."""
    ends: list[float] = []
    first: dict[tuple[int, int], float] = {}
    last: dict[tuple[int, int], float] = {}
    for task in tasks:
        start = max(
            (ends[need] + (latency if tasks[need].rank != task.rank else 0.0) for need in task.needs), default=0.0
        )
        ends.append(start + task.duration)
        key = task.rank, task.micro_batch
        if task.kind is Kind.FORWARD:
            first[key] = min(first.get(key, start), start)
        elif task.kind is Kind.BACKWARD:
            last[key] = max(last.get(key, 0.0), ends[-1])
    return {key: end - first[key] for key, end in last.items() if key in first}
