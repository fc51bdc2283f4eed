"""A schedule: the tasks of a step, and the order in which each rank runs its own."""

from __future__ import annotations

from dataclasses import dataclass

from farspan.schedule.task import Task

__all__ = ["Schedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The order in which every rank runs its tasks: it is what is simulated, and what a runtime can execute.

    Attributes:
        tasks: All tasks of the step; each needs only tasks before it.
        orders: For each rank the indices of its tasks.
    """

    tasks: tuple[Task, ...]
    orders: tuple[tuple[int, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.orders)
