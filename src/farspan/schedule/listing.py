"""List scheduling: the order of every rank's tasks, found by playing the step once with the planned durations.

Each rank, whenever it is free, takes a ready task: the oldest micro-batch's backward if there is one, else the oldest
micro-batch's forward, unless that would leave more micro-batches in flight than its depth, else weight gradients. On a
plain chain of equal stages that is 1F1B:

    rank 0   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    rank 1   .. F0 F1 .. B0 F2 B1 F3 B2 .. B3
    rank 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3

or, where weight gradients are tasks of their own, they are put where nothing else could run (P. Qi et al., Zero bubble
pipeline parallelism, 2023, arXiv 2401.10241). Rank 0 has none here, for nobody waits for its backwards:

    rank 0   F0 F1 F2 F3 B0 B1 B2 B3
    rank 1   F0 F1 F2 B0 W0 B1 F3 W1 B2 W2 B3 W3
    rank 2   F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3

On any other graph of segments (skips, V shapes, encoder-decoder, micro-batches that differ) the order is still a valid
one, since it comes from a play in which every task ran after all it needs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from farspan.schedule.task import Kind, Task

__all__ = ["list_schedule"]


def list_schedule(
    tasks: Sequence[Task], num_ranks: int, *, in_flight: Sequence[int] | None = None, run_ahead: int = 0
) -> list[list[int]]:
    """Order the tasks of every rank.

    Args:
        tasks: All tasks of the step; each needs only tasks before it.
        num_ranks: Ranks are 0 .. num_ranks - 1.
        in_flight: For each rank how many micro-batches may hold activations there at once; by default its depth, the
            number of levels from its first task to the last of the micro-batch (1F1B).
        run_ahead: How many more than that: memory for latency. With one more, a rank has a forward to run while the
            gradient it waits for is on its way, and can put off weight gradients. It is of no use to a rank at the end
            that has none: it waits for nobody.

    Returns:
        For each rank the indices of its tasks, in the order they are to run.
    """
    if in_flight is None:
        has_weights = {task.rank for task in tasks if task.kind is Kind.WEIGHT}
        in_flight = [
            depth + (run_ahead if depth > 1 or rank in has_weights else 0)
            for rank, depth in enumerate(_depths(tasks, num_ranks))
        ]
    waiting = [len(task.needs) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    left_to_release: list[dict[int, int]] = [{} for _ in range(num_ranks)]  # tasks after the forward, by micro-batch
    for index, task in enumerate(tasks):
        for need in task.needs:
            followers[need].append(index)
        if task.kind is not Kind.FORWARD:
            counts = left_to_release[task.rank]
            counts[task.micro_batch] = counts.get(task.micro_batch, 0) + 1

    ready: dict[Kind, list[list[tuple[int, int]]]] = {kind: [[] for _ in range(num_ranks)] for kind in Kind}
    backwards, forwards, weights = ready[Kind.BACKWARD], ready[Kind.FORWARD], ready[Kind.WEIGHT]
    held: list[set[int]] = [set() for _ in range(num_ranks)]
    orders: list[list[int]] = [[] for _ in range(num_ranks)]
    is_free = [True] * num_ranks
    running: list[tuple[float, int]] = []

    def make_ready(index: int) -> None:
        task = tasks[index]
        heapq.heappush(ready[task.kind][task.rank], (task.micro_batch, index))

    def start(rank: int, index: int, now: float) -> None:
        task = tasks[index]
        orders[rank].append(index)
        is_free[rank] = False
        if task.kind is Kind.FORWARD and task.holds and task.micro_batch in left_to_release[rank]:
            held[rank].add(task.micro_batch)
        heapq.heappush(running, (now + task.duration, index))

    def choose(rank: int, now: float, *, force: bool = False) -> bool:
        if backwards[rank]:
            start(rank, heapq.heappop(backwards[rank])[1], now)
            return True
        if forwards[rank]:
            micro_batch = forwards[rank][0][0]
            if force or micro_batch in held[rank] or len(held[rank]) < in_flight[rank]:
                start(rank, heapq.heappop(forwards[rank])[1], now)
                return True
        if weights[rank]:
            start(rank, heapq.heappop(weights[rank])[1], now)
            return True
        return False

    for index, count in enumerate(waiting):
        if count == 0:
            make_ready(index)
    now = 0.0
    touched = range(num_ranks)
    while True:
        for rank in touched:
            if is_free[rank]:
                choose(rank, now)
        if not running:
            # Only the limits stand in the way: the oldest waiting forward goes ahead.
            blocked = [(forwards[rank][0], rank) for rank in range(num_ranks) if forwards[rank]]
            if not blocked:
                break
            choose(min(blocked)[1], now, force=True)
            continue
        now = running[0][0]
        changed: set[int] = set()
        while running and running[0][0] == now:
            index = heapq.heappop(running)[1]
            task = tasks[index]
            is_free[task.rank] = True
            changed.add(task.rank)
            if task.kind is not Kind.FORWARD:
                counts = left_to_release[task.rank]
                counts[task.micro_batch] -= 1
                if not counts[task.micro_batch]:
                    held[task.rank].discard(task.micro_batch)
            for follower in followers[index]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    make_ready(follower)
                    changed.add(tasks[follower].rank)
        touched = sorted(changed)
    assert sum(map(len, orders)) == len(tasks), "the tasks depend on each other in a circle"
    return orders


def _depths(tasks: Sequence[Task], num_ranks: int) -> list[int]:
    """How many levels lie between a rank's first task and the last of its micro-batch, both counted."""
    last: dict[int, int] = {}
    forwards = [task for task in tasks if task.kind is Kind.FORWARD]
    for task in forwards:
        last[task.micro_batch] = max(last.get(task.micro_batch, 0), task.level)
    depths = [1] * num_ranks
    for task in forwards:
        depths[task.rank] = max(depths[task.rank], last[task.micro_batch] - task.level + 1)
    return depths
