"""The record of a simulated step: when each task ran, and the numbers that follow.

rank 0   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
         |<------------ span(0) ---------->|      busy(0): all that is not ".."
"""

from __future__ import annotations

from dataclasses import dataclass

from farspan.schedule import Kind, Message, Schedule

__all__ = ["Simulation", "Transfer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A message on its way: its link is busy from `start` to `free`, and it is there at `end`."""

    message: Message
    start: float
    free: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Times are in the unit of the tasks' durations, from the start of the step.

    Attributes:
        schedule: What was simulated.
        starts: When each task begins, by its index.
        ends: When each task has ended.
        transfers: All messages, in the order in which they left.
    """

    schedule: Schedule
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    transfers: tuple[Transfer, ...]

    @property
    def step_time(self) -> float:
        return max(self.ends, default=0.0)

    def busy(self, rank: int) -> float:
        """Returns how long a rank runs tasks."""
        return sum(self.schedule.tasks[index].duration for index in self.schedule.orders[rank])

    def span(self, rank: int) -> float:
        """Returns the time from the start of a rank's first task to the end of its last."""
        order = self.schedule.orders[rank]
        return self.ends[order[-1]] - self.starts[order[0]] if order else 0.0

    def idle(self, rank: int) -> float:
        """Returns how long a rank waits between its first task and its last."""
        return self.span(rank) - self.busy(rank)

    @property
    def longest_span(self) -> float:
        """Returns what a step costs where steps follow each other without a barrier: each rank may begin the next at
        once."""
        return max(map(self.span, range(self.schedule.num_ranks)), default=0.0)

    @property
    def bubble_rate(self) -> float:
        """The share of all ranks' time, each for the longest span of any, in which they do not run tasks.

        With equal stages (cost - m (F + B + W)) / cost, as in P. Qi et al., Zero bubble pipeline parallelism, 2023,
        arXiv 2401.10241, section 5.3.
        """
        area = self.longest_span * self.schedule.num_ranks
        return 1 - sum(map(self.busy, range(self.schedule.num_ranks))) / area if area else 0.0

    def peak_memory(self, rank: int) -> float:
        """Returns the most a rank holds at once, in the unit of `Task.memory`."""
        held = peak = 0.0
        for index in self.schedule.orders[rank]:
            held += self.schedule.tasks[index].memory
            peak = max(peak, held)
        return peak

    def peak_micro_batches(self, rank: int) -> int:
        """Returns the most forwards whose activations a rank holds at once, each until the last of its backward has
        run."""
        tasks, order = self.schedule.tasks, self.schedule.orders[rank]
        last = {tasks[index].micro_batch: place for place, index in enumerate(order)}
        changes = [0] * (len(order) + 1)
        for place, index in enumerate(order):
            task = tasks[index]
            if task.kind is Kind.FORWARD and task.holds:
                changes[place] += 1
                changes[last[task.micro_batch] + 1] -= 1
        held = peak = 0
        for change in changes:
            held += change
            peak = max(peak, held)
        return peak
