"""Limits on how much a rank may hold at once: they make a list schedule 1F1B or anything else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from farspan.schedule.task import Kind, Task

__all__ = ["Limits", "depths", "hops_after", "in_flight_of_1f1b", "together_in"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that a rank may hold at once.

    Attributes:
        in_flight: Micro-batches between their forward and their backward.
        stored: The sum of `Task.memory`, in its unit.
        memory: The same. The others give way where nothing else could run; this one never does.
    """

    in_flight: float
    stored: float = math.inf
    memory: float = math.inf


def in_flight_of_1f1b(tasks: Sequence[Task], num_ranks: int, *, run_ahead: int = 0) -> list[int]:
    """Returns how many micro-batches each rank may have in flight in 1F1B: as many as it is deep.

    Args:
        tasks: All tasks of the step.
        num_ranks: Ranks are 0 .. num_ranks - 1.
        run_ahead: How many more than that: memory for latency. With one more, a rank has a forward to run while the
            gradient it waits for is on its way, and can defer weight gradients for longer. The last rank, which waits
            for none, has as many more only if it has weight gradients to defer.
    """
    has_weights = {task.rank for task in tasks if task.kind is Kind.WEIGHT}
    return [
        depth + (run_ahead if depth > 1 or rank in has_weights else 0)
        for rank, depth in enumerate(depths(tasks, num_ranks))
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
