"""The tasks of a step, made of what its segments and backwards are in numbers: those that the runtime executes,
and those that the planner simulates.

    forwards    0 1 2 | 3 4 5 | ...      of each micro-batch its segments, each after all that it uses
    backwards   0 1 2 | 3 4 5 | ...      of each micro-batch, in the order in which they can run

Forwards and backwards are known by these numbers; tasks by their place among all tasks: first all forwards, then each
backward, with its weight gradients behind it if it is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from farspan.schedule import NOMINAL_S, Kind, Schedule, Task, orders_by_name, split_from

__all__ = ["BackwardWork", "ForwardWork", "StepTasks", "StepWork", "scheduled"]


class ForwardWork(NamedTuple):
    """The forward of a segment."""

    rank: int
    """The rank, as in `Task`."""
    micro_batch: int
    level: int
    uses: tuple[int, ...]
    """Numbers of the forwards whose values it uses."""
    states: tuple[int, ...]
    """States that it must find as the forward before it with the same number has left them."""
    holds: bool
    """True if a backward of its micro-batch follows."""
    keeps: bool
    """True if it keeps something for a backward, which is released in the same micro-batch."""
    width: int = 1
    """Number of ranks that take micro-batches of its stage in turn. Each may take so many times as long for one as
    others do, which is why there are so many.
    """
    gradients: tuple[int, ...] = ()
    """Gradients that it reads or writes, by numbers of `BackwardWork.accumulates`. Backwards add to them after it: what
    is recorded about a gradient behind a backward that adds to it is of a later step.
    """


class BackwardWork(NamedTuple):
    """A segment's share of a backward."""

    rank: int
    micro_batch: int
    level: int
    forward: int
    """The number of the segment's forward; -1 if that is not in the step."""
    uses: tuple[int, ...]
    """Numbers of the backwards whose gradients it uses."""
    accumulates: tuple[int, ...]
    """What it adds to; backwards that have the same number here add up one after the other."""
    frees: bool
    """True if it releases what its forward keeps."""
    is_worth_splitting: bool
    """True if its weight gradients are worth a task of their own where another rank waits for the rest."""
    feeds_another_rank: bool
    """True if another rank waits for it that has no backward in the step."""
    width: int = 1
    """The width, as for its forward."""


class StepWork(NamedTuple):
    """The work of a step: all that its tasks depend on."""

    forwards: tuple[ForwardWork, ...]
    backwards: tuple[BackwardWork, ...]
    teams: tuple[int, ...] = ()
    """For each rank the least one of those that run each layer together with it; nothing where all run theirs alone."""

    def repeated(self, count: int) -> StepWork:
        """Returns the step of so many micro-batches that are like this one.

        The ranks of a wide stage follow one another, from the one given here; each adds up gradients by itself.
        """
        num_forwards, num_backwards = len(self.forwards), len(self.backwards)
        forwards = [
            each._replace(
                rank=each.rank + number % each.width,
                micro_batch=number,
                uses=_shifted(each.uses, number * num_forwards),
                gradients=_shifted(each.gradients, number % each.width * num_forwards),
            )
            for number in range(count)
            for each in self.forwards
        ]
        backwards = [
            each._replace(
                rank=each.rank + number % each.width,
                micro_batch=number,
                forward=each.forward + number * num_forwards,
                uses=_shifted(each.uses, number * num_backwards),
                accumulates=_shifted(each.accumulates, number % each.width * num_forwards),
            )
            for number in range(count)
            for each in self.backwards
        ]
        return StepWork(tuple(forwards), tuple(backwards), self.teams)


class StepTasks(NamedTuple):
    """The tasks of a step in the order of every rank."""

    schedule: Schedule
    work: tuple[int, ...]
    """For each task the number of its forward or backward."""
    backwards: tuple[int, ...]
    """For each backward, by number, its task: of two the first."""

    def leaves_weights(self, task: int) -> bool:
        """Returns whether it is a backward that defers weight gradients to a task of their own."""
        tasks = self.schedule.tasks
        return tasks[task].kind is Kind.BACKWARD and task + 1 < len(tasks) and tasks[task + 1].kind is Kind.WEIGHT


def scheduled(work: StepWork, name: str, num_ranks: int, run_ahead: int) -> StepTasks:
    """Returns the tasks of a step, of nominal durations, in the orders of a schedule.

    Args:
        work: The step.
        name: Of the schedule.
        num_ranks: Ranks are 0 .. num_ranks - 1.
        run_ahead: As for `schedule.orders_by_name`.
    """
    found = _tasks_of(work, 0)
    first = split_from(name, found.tasks, num_ranks, run_ahead=run_ahead)
    if first:
        found = _tasks_of(work, first)
    orders = orders_by_name(name, found.tasks, num_ranks, run_ahead=run_ahead)
    schedule = Schedule(tasks=found.tasks, orders=tuple(map(tuple, orders)))
    return StepTasks(schedule, found.work, found.backwards)


class _Tasks(NamedTuple):
    tasks: tuple[Task, ...]
    work: tuple[int, ...]
    backwards: tuple[int, ...]


def _tasks_of(work: StepWork, split_from: int) -> _Tasks:
    """Returns the tasks of a step; backwards are split from micro-batch `split_from` on."""
    tasks: list[Task] = []
    last_use: dict[int, int] = {}
    touching: dict[int, list[int]] = {}
    """For each gradient the forwards that read it or write into it."""
    for number, forward in enumerate(work.forwards):
        tasks.append(
            Task(
                kind=Kind.FORWARD,
                rank=forward.rank,
                micro_batch=forward.micro_batch,
                level=forward.level,
                duration=NOMINAL_S * forward.width,
                needs=_sorted({*forward.uses, *(last_use[key] for key in forward.states if key in last_use)}),
                holds=forward.holds,
                memory=float(forward.keeps),
                team=work.teams[forward.rank] if work.teams else None,
            )
        )
        last_use.update(dict.fromkeys(forward.states, number))
        for key in forward.gradients:
            touching.setdefault(key, []).append(number)
    numbers = list(range(len(tasks)))
    places: list[int] = []
    last: dict[int, int] = {}
    """For each thing that is added to, the task that has completed it last."""
    inputs: dict[int, int] = {}
    """For each such task the one whose gradients of inputs come before it: another one if the backward is split."""
    feeds = _feeding_another_rank(work.backwards)
    for number, backward in enumerate(work.backwards):
        is_split = backward.micro_batch >= split_from and backward.is_worth_splitting and feeds[number]
        before = [last[key] for key in backward.accumulates if key in last]
        own = len(tasks)
        needs = {places[source] for source in backward.uses}
        needs.update(task for key in backward.accumulates for task in touching.get(key, ()))
        if backward.forward >= 0:
            needs.add(backward.forward)
        needs.update([inputs[task] for task in before] if is_split else before)
        memory = -1.0 if backward.frees else 0.0
        places.append(own)
        if is_split:
            tasks.append(_task_of(backward, Kind.BACKWARD, needs, width=1, memory=0.0))
            tasks.append(_task_of(backward, Kind.WEIGHT, {own, *before}, width=1, memory=memory))
            numbers += [number, number]
        else:
            tasks.append(_task_of(backward, Kind.BACKWARD, needs, width=2, memory=memory))
            numbers.append(number)
        inputs[len(tasks) - 1] = own
        last.update(dict.fromkeys(backward.accumulates, len(tasks) - 1))
    return _Tasks(tuple(tasks), tuple(numbers), tuple(places))


def _task_of(backward: BackwardWork, kind: Kind, needs: set[int], *, width: int, memory: float) -> Task:
    """Returns a task of a backward, or of a part of one: `width` forwards long."""
    return Task(
        kind=kind,
        rank=backward.rank,
        micro_batch=backward.micro_batch,
        level=backward.level,
        duration=NOMINAL_S * backward.width * width,
        needs=_sorted(needs),
        holds=False,
        memory=memory,
    )


def _feeding_another_rank(backwards: Sequence[BackwardWork]) -> list[bool]:
    """Returns for each whether another rank waits for it, if only for what its own rank makes of it."""
    feeds = [each.feeds_another_rank for each in backwards]
    for number in reversed(range(len(backwards))):
        for source in backwards[number].uses:
            if feeds[number] or backwards[source].rank != backwards[number].rank:
                feeds[source] = True
    return feeds


def _shifted(numbers: tuple[int, ...], by: int) -> tuple[int, ...]:
    return tuple([number + by for number in numbers])


def _sorted(needs: set[int]) -> tuple[int, ...]:
    return tuple(sorted(needs))
