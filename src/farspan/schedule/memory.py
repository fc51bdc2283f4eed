"""Tracks what one rank holds while its schedule is being made, and decides whether it may hold more.

A forward of a micro-batch that has more to run on this rank must leave enough for the rest of it, or nobody could ever
go on. So a forward may start only if, afterwards, the micro-batches that have begun here could all be finished one
after another, oldest first (the banker's algorithm, with the order given): with `kept(j)` what micro-batch j holds and
`still(j)` what its forwards that have not run will add,

    free + sum of kept(i) for i < j  >=  still(j)       for each j that has begun

and micro-batches begin in order. Then the oldest unfinished micro-batch of all can always go on, on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable

from farspan.schedule.task import Kind, Task

__all__ = ["Memory"]

_SLACK = 1e-9
"""Tolerance relative to the limit, for sums of fractions, which are not exact."""


class Memory:
    """The memory of one rank, in the unit of `Task.memory`.

    Args:
        limit: How much there is.
        tasks: All tasks of the rank.
    """

    def __init__(self, limit: float, tasks: Iterable[Task]) -> None:
        self.limit = limit * (1 + _SLACK)
        self.held = 0.0
        self.kept: dict[int, float] = {}
        """What each micro-batch holds that has begun here and has not ended, in order of its beginning."""
        self.still: dict[int, float] = {}
        self.left: dict[int, int] = {}
        for task in tasks:
            self.left[task.micro_batch] = self.left.get(task.micro_batch, 0) + 1
            if _takes(task):
                self.still[task.micro_batch] = self.still.get(task.micro_batch, 0.0) + task.memory
        self.waiting = sorted(self.still, reverse=True)
        """Micro-batches that take memory here and have not begun, in reverse order."""

    def fits(self, task: Task) -> bool:
        """Returns whether the forward `task` may start."""
        if not _takes(task):
            return True
        if task.micro_batch not in self.kept and task.micro_batch != self.waiting[-1]:
            return False
        free = self.limit - self.held - task.memory
        for micro_batch in self.kept if task.micro_batch in self.kept else [*self.kept, task.micro_batch]:
            own = task.memory if micro_batch == task.micro_batch else 0.0
            if self.still[micro_batch] - own > free:
                return False
            free += self.kept.get(micro_batch, 0.0) + own
        return True

    def start(self, task: Task) -> None:
        """Adds the memory that `task` takes."""
        if _takes(task):
            self.held += task.memory
            self.still[task.micro_batch] -= task.memory
            self.kept[task.micro_batch] = self.kept.get(task.micro_batch, 0.0) + task.memory
            if self.waiting and self.waiting[-1] == task.micro_batch:
                self.waiting.pop()

    def end(self, task: Task) -> None:
        """Releases the memory that `task` gives back."""
        self.left[task.micro_batch] -= 1
        if task.memory < 0:
            self.held += task.memory
            self.kept[task.micro_batch] = self.kept.get(task.micro_batch, 0.0) + task.memory
        if not self.left[task.micro_batch]:
            self.kept.pop(task.micro_batch, None)


def _takes(task: Task) -> bool:
    return task.kind is Kind.FORWARD and task.memory > 0
