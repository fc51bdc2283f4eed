"""A smaller problem with the same optimum: groups that lose nothing by going wherever another goes.

Group n goes with group m if n takes no time anywhere, may go wherever m may, each of its values has a pin in m too,
and its memory is nothing or can never matter. Moving n to where m lies then takes no value to a new device: each value
of n keeps a pin there. So some best placement has both together. Constants and their consumers are such pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from benchmarks.planner_placement.placement.problem import Problem

from farspan.planner.cost_model.colocation import FloatArray

__all__ = ["Merged", "merge_groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The smaller problem, and for each group of the larger one its group there."""

    problem: Problem
    group_of: tuple[int, ...]

    def apart(self, device_of: Sequence[int]) -> list[int]:
        """A placement of the larger problem."""
        return [device_of[group] for group in self.group_of]

    def together(self, device_of: Sequence[int]) -> list[int]:
        """The placement nearest to one of the larger problem: a merged group goes where its first timed one does."""
        found: dict[int, int] = {}
        for group in sorted(range(len(self.group_of)), key=lambda each: each not in self.group_of):
            found.setdefault(self.group_of[group], device_of[group])
        return [found[group] for group in range(self.problem.num_groups)]


def merge_groups(problem: Problem) -> Merged:
    """Merge what can be merged; the order of stages (`before`) is lost."""
    parent = list(range(problem.num_groups))

    def root(group: int) -> int:
        while parent[group] != group:
            parent[group] = parent[parent[group]]
            group = parent[group]
        return group

    free_memory = problem.memory_bytes.sum() <= problem.limits.min()
    idle = (problem.time_s == 0).all(axis=1) & ((problem.memory_bytes == 0) | free_memory)
    changed = True
    while changed:
        changed = False
        values_of: list[list[set[int]]] = [[] for _ in range(problem.num_groups)]
        for pins in problem.pins:
            roots = {root(pin) for pin in pins}
            if len(roots) > 1:
                for each in roots:
                    values_of[each].append(roots)
        alone = {group: root(group) == group and idle[group] for group in range(problem.num_groups)}
        for group in range(problem.num_groups):
            if not alone[group] or root(group) != group:
                continue
            hosts = set[int].intersection(*values_of[group]) - {group} if values_of[group] else {root(0)} - {group}
            hosts = {host for host in map(root, hosts) if host != group}
            if hosts:
                host = min(hosts)
                parent[group] = host
                idle[host] = idle[host] and idle[group]
                changed = True
    return _smaller(problem, [root(group) for group in range(problem.num_groups)])


def _smaller(problem: Problem, roots: list[int]) -> Merged:
    numbers = {group: number for number, group in enumerate(sorted(set(roots)))}
    group_of = [numbers[group] for group in roots]
    time_s = np.zeros((len(numbers), problem.time_s.shape[1]))
    memory = np.zeros(len(numbers))
    groups: list[list[int]] = [[] for _ in numbers]
    for group, number in enumerate(group_of):
        time_s[number] += problem.time_s[group]
        memory[number] += problem.memory_bytes[group]
        groups[number] += problem.groups[group]
    costs: dict[tuple[int, ...], FloatArray] = {}
    for pins, cost in zip(problem.pins, problem.cost_s, strict=True):
        merged = tuple(sorted({group_of[pin] for pin in pins}))
        if len(merged) > 1:
            costs[merged] = costs.get(merged, 0.0) + cost
    cost_s = np.array(list(costs.values())) if costs else np.zeros((0, problem.time_s.shape[1]))
    smaller = replace(
        problem,
        groups=tuple(map(tuple, groups)),
        before=(),
        time_s=time_s,
        memory_bytes=memory,
        pins=tuple(costs),
        cost_s=cost_s,
    )
    return Merged(problem=smaller, group_of=tuple(group_of))
