"""List scheduling: the order of every rank's tasks, found by simulating the step once with the planned durations.

Each rank, whenever it is free, takes a task that is ready: the oldest micro-batch's backward if another rank waits for
it, else the oldest micro-batch's forward, unless that would leave more micro-batches in flight than it may have, else
what nobody waits for: weight gradients, and the backwards of a first stage. On a plain chain of equal stages, with as
many in flight as a rank is deep, that is 1F1B:

    rank 0   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    rank 1   .. F0 F1 .. B0 F2 B1 F3 B2 .. B3
    rank 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3

or, where weight gradients are tasks of their own, and in the memory that rank 0 of 1F1B holds, close to ZB-H1 (P. Qi et
al., Zero bubble pipeline parallelism, 2023, arXiv 2401.10241):

    rank 0   F0 F1 F2 .. .. B0 W0 F3 B1 W1 B2 W2 .. B3 W3
    rank 1   .. F0 F1 .. B0 F2 B1 W0 B2 F3 W1 W2 B3 W3
    rank 2   .. .. F0 B0 F1 B1 F2 B2 W0 W1 F3 B3 W2 W3

On any other graph of segments (skips, V shapes, encoder-decoder, micro-batches that differ) the order is still a valid
one, since it comes from a simulation in which every task ran after all it needs.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from farspan.errors import PlanError
from farspan.schedule.limits import Limits
from farspan.schedule.memory import Memory
from farspan.schedule.task import Kind, Task

__all__ = ["Simulation"]

_AT_ONCE, _FORWARD, _LATER = range(3)
_Turn = tuple[int, int, int]
_ROUNDING = 1 + 1e-9
"""Tolerance for sums of fractions, which are not exact."""


class Simulation:
    """One simulated step, in which every rank that is free chooses its next task.

    Args:
        tasks: All tasks of the step.
        limits: Of each rank.
        latency: From the end of a task to when another rank has what it made.
        patience: What nobody waits for is not begun if something else will be ready within this share of its duration.
        forwards_first: Whether a forward for which there is room goes before a backward.
        group: So many micro-batches go through a stage of a rank before its next stage takes the first of them:
            interleaving. With 1 the oldest micro-batch always goes first.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        limits: Sequence[Limits],
        latency: float,
        *,
        patience: float = 0.5,
        forwards_first: bool = False,
        group: int = 1,
    ) -> None:
        num_ranks = len(limits)
        self.tasks = tasks
        self.limits = limits
        self.latency = latency
        self.patience = patience
        self.forwards_first = forwards_first
        self.group = group
        self.orders: list[list[int]] = [[] for _ in range(num_ranks)]
        self.waiting = [len(task.needs) for task in tasks]
        self.arrival = [0.0] * len(tasks)
        """The time at which the last of what a task needs arrives, as far as it is known."""
        self.followers: list[list[int]] = [[] for _ in tasks]
        for index, task in enumerate(tasks):
            for need in task.needs:
                self.followers[need].append(index)
        self.is_free = [True] * num_ranks
        self.urgency = _urgency(tasks, self.followers)
        self.ready: list[list[list[tuple[_Turn, int]]]] = [[[] for _ in range(num_ranks)] for _ in range(3)]
        """Heaps of (turn, task), indexed by urgency and rank."""
        self.coming: list[dict[int, float]] = [{} for _ in range(num_ranks)]
        """For each rank the tasks whose inputs are known to arrive, and when."""
        self.events: list[tuple[float, int, bool]] = []
        """Heap of (time, task, whether it ends rather than becomes ready)."""
        self.backwards_left = [Counter[int]() for _ in range(num_ranks)]
        """For each rank, how many backwards of each micro-batch have not ended."""
        for task in tasks:
            self.backwards_left[task.rank][task.micro_batch] += task.kind is Kind.BACKWARD
        self.in_flight: list[set[int]] = [set() for _ in range(num_ranks)]
        self.memories = _memories(tasks, limits)
        self.stored = [0.0] * num_ranks
        """The sum of `Task.memory` for each rank."""
        self.begins = [math.inf] * num_ranks
        self.ends = [0.0] * num_ranks
        """The time at which each rank's last task ends; `begins` is when its first one begins."""

    def run(self) -> None:
        for index, count in enumerate(self.waiting):
            if not count:
                self._becomes_ready(index, 0.0)
        now = 0.0
        while True:
            while self.events:
                now = self.events[0][0]
                touched: set[int] = set()
                while self.events and self.events[0][0] == now:
                    _, index, has_ended = heapq.heappop(self.events)
                    touched.add(self.tasks[index].rank)
                    (self._end if has_ended else self._arrive)(index)
                for rank in sorted(touched):
                    if self.is_free[rank]:
                        self._choose(rank, now)
            # Only the limits stand in the way, if anything: the oldest waiting forward goes ahead.
            blocked = [(heap[0], rank) for rank, heap in enumerate(self.ready[_FORWARD]) if heap]
            if not blocked:
                break
            fitting = [(head, rank) for head, rank in blocked if self._fits(rank, head[1])]
            if not fitting:
                self._complain(*min(blocked))
            self._start(_FORWARD, min(fitting)[1], now)
        assert sum(map(len, self.orders)) == len(self.tasks), "the tasks depend on each other in a circle"

    @property
    def cost(self) -> float:
        """The longest span from a rank's first task to its last."""
        return max((end - begin for begin, end in zip(self.begins, self.ends, strict=True)), default=0.0)

    def _becomes_ready(self, index: int, time: float) -> None:
        self.coming[self.tasks[index].rank][index] = time
        heapq.heappush(self.events, (time, index, False))

    def _arrive(self, index: int) -> None:
        task = self.tasks[index]
        del self.coming[task.rank][index]
        heapq.heappush(self.ready[self.urgency[index]][task.rank], (self._turn_of(task), index))

    def _turn_of(self, task: Task) -> _Turn:
        """Returns the order among ready tasks: forwards with the lower level first, backwards with the higher one."""
        depth = task.level if task.kind is Kind.FORWARD else -task.level
        return task.micro_batch // self.group, depth, task.micro_batch

    def _choose(self, rank: int, now: float) -> None:
        forwards, rest = self.ready[_FORWARD][rank], self.ready[_LATER][rank]
        may_go_forward = bool(forwards) and self._has_room(rank, forwards[0][1])
        if self.ready[_AT_ONCE][rank] and not (may_go_forward and self.forwards_first):
            self._start(_AT_ONCE, rank, now)
        elif may_go_forward:
            self._start(_FORWARD, rank, now)
        elif rest:
            until = now + self.patience * self.tasks[rest[0][1]].duration
            if not any(time < until and self._is_welcome(index) for index, time in self.coming[rank].items()):
                self._start(_LATER, rank, now)

    def _is_welcome(self, index: int) -> bool:
        """Returns whether a task would start as soon as it is ready."""
        task, urgency = self.tasks[index], self.urgency[index]
        return urgency == _AT_ONCE or (urgency == _FORWARD and self._has_room(task.rank, index))

    def _has_room(self, rank: int, index: int) -> bool:
        task, limit = self.tasks[index], self.limits[rank]
        if not self._fits(rank, index) or (
            task.memory > 0 and self.stored[rank] + task.memory > limit.stored * _ROUNDING
        ):
            return False
        if task.micro_batch in self.in_flight[rank]:
            return True
        return len(self.in_flight[rank]) < limit.in_flight

    def _fits(self, rank: int, index: int) -> bool:
        memory = self.memories[rank]
        return memory is None or memory.fits(self.tasks[index])

    def _complain(self, head: tuple[_Turn, int], rank: int) -> NoReturn:
        task, memory = self.tasks[head[1]], self.memories[rank]
        assert memory is not None
        raise PlanError(
            f"no order of the tasks keeps rank {rank} within {self.limits[rank].memory:g} of memory.",
            why=f"a forward of micro-batch {task.micro_batch} takes {task.memory:g}, and {memory.held:g} is held by "
            f"{len(memory.kept)} micro-batches, none of which can go on.",
            hint="a higher limit, smaller micro-batches, or more ranks",
        )

    def _start(self, urgency: int, rank: int, now: float) -> None:
        _, index = heapq.heappop(self.ready[urgency][rank])
        task = self.tasks[index]
        self.orders[rank].append(index)
        self.is_free[rank] = False
        if task.kind is Kind.FORWARD and task.holds and self.backwards_left[rank][task.micro_batch]:
            self.in_flight[rank].add(task.micro_batch)
        memory = self.memories[rank]
        if memory is not None:
            memory.start(task)
        self.stored[rank] += max(0.0, task.memory)
        end = now + task.duration
        self.begins[rank] = min(self.begins[rank], now)
        self.ends[rank] = end
        heapq.heappush(self.events, (end, index, True))
        for follower in self.followers[index]:
            there = end if self.tasks[follower].rank == rank else end + self.latency
            self.arrival[follower] = max(self.arrival[follower], there)
            self.waiting[follower] -= 1
            if not self.waiting[follower]:
                self._becomes_ready(follower, self.arrival[follower])

    def _end(self, index: int) -> None:
        task = self.tasks[index]
        rank, micro_batch = task.rank, task.micro_batch
        self.is_free[rank] = True
        memory = self.memories[rank]
        if memory is not None:
            memory.end(task)
        self.stored[rank] += min(0.0, task.memory)
        if task.kind is Kind.BACKWARD:
            left = self.backwards_left[rank]
            left[micro_batch] -= 1
            if not left[micro_batch]:
                self.in_flight[rank].discard(micro_batch)


def _memories(tasks: Sequence[Task], limits: Sequence[Limits]) -> list[Memory | None]:
    """Returns for each rank its `Memory`, or None where the rank has no limit."""
    return [
        None if limit.memory == math.inf else Memory(limit.memory, (task for task in tasks if task.rank == rank))
        for rank, limit in enumerate(limits)
    ]


def _urgency(tasks: Sequence[Task], followers: Sequence[Sequence[int]]) -> list[int]:
    urgency = [_LATER] * len(tasks)
    for index in reversed(range(len(tasks))):
        task = tasks[index]
        if task.kind is Kind.FORWARD:
            urgency[index] = _FORWARD
        elif task.kind is Kind.BACKWARD and any(
            tasks[item].rank != task.rank or urgency[item] == _AT_ONCE for item in followers[index]
        ):
            urgency[index] = _AT_ONCE
    return urgency
