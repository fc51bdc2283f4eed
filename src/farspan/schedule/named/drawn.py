"""An order drawn at random among all that the tasks allow: what is right in every order shows it in such a one.

    needs      F0 -> B0, F1 -> B1, B0 -> B1        one global order      F1 F0 B0 B1
                                                   each rank runs its own tasks in that

The orders of all ranks are parts of one global order, so no order can deadlock. Limits of memory do not count. Ranks
that run each layer together run their tasks in one order: those with the same place in it are drawn as one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from farspan.schedule.task import Task

__all__ = ["drawn_name", "drawn_orders"]

_PREFIX = "drawn:"


def drawn_name(seed: str) -> str:
    """Returns the name of the schedule that `seed` draws: one that plans cannot ask for.

    >>> drawn_name("1:0")
    'drawn:1:0'
    """
    return _PREFIX + seed


def drawn_orders(name: str, tasks: Sequence[Task], num_ranks: int) -> list[list[int]] | None:
    """Returns for each rank the indices of its tasks in an order that follows from `name` alone; None for a schedule of
    another kind.

    Args:
        name: Of the schedule.
        tasks: All tasks of the step; each needs only tasks before it.
        num_ranks: Ranks are 0 .. num_ranks - 1.
    """
    if not name.startswith(_PREFIX):
        return None
    draw = random.Random(name)
    group_of = _groups(tasks)
    members: dict[int, list[int]] = {}
    for index, group in enumerate(group_of):
        members.setdefault(group, []).append(index)
    needs = {group: {group_of[need] for index in own for need in tasks[index].needs} for group, own in members.items()}
    orders: list[list[int]] = [[] for _ in range(num_ranks)]
    waiting = {group: len(before - {group}) for group, before in needs.items()}
    followers: dict[int, list[int]] = {}
    for group, before in needs.items():
        for need in before - {group}:
            followers.setdefault(need, []).append(group)
    ready = [group for group, count in waiting.items() if not count]
    num_drawn = 0
    while ready:
        place = draw.randrange(len(ready))
        ready[place], ready[-1] = ready[-1], ready[place]
        group = ready.pop()
        num_drawn += 1
        for index in members[group]:
            orders[tasks[index].rank].append(index)
        for follower in followers.get(group, ()):
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
    if num_drawn < len(members):  # teams whose members' tasks wait for each other: the order in which they were given
        return [[index for index, task in enumerate(tasks) if task.rank == rank] for rank in range(num_ranks)]
    return orders


def _groups(tasks: Sequence[Task]) -> list[int]:
    """Returns for each task the first of those that the other ranks of its team run at its place; itself if alone."""
    team_of = {task.rank: task.team for task in tasks if task.team is not None}
    sizes = Counter(team_of.values())
    seen = Counter[object]()
    first: dict[object, int] = {}
    groups: list[int] = []
    for index, task in enumerate(tasks):
        team = team_of.get(task.rank)
        if team is None or sizes[team] == 1:
            groups.append(index)
            continue
        key = (team, task.kind, task.micro_batch, task.level)
        place = (*key, seen[key, task.rank])
        seen[key, task.rank] += 1
        groups.append(first.setdefault(place, index))
    return groups
