"""Chooses which nodes of a stage run in a way that keeps less: a knapsack for each stage, all stages of one start at
once.

Each node starts with its fastest option. A step replaces a node's option by one that keeps less and takes longer; the
steps of a node lie on the lower convex hull of (bytes saved, seconds added), so that sorted by seconds per byte they
come in their order. Steps alike in bytes and seconds (those of repeated blocks) are one kind, of which a stage has a
number. Steps are taken in that order until what they save covers what is missing; then

    the last of them is exchanged for a cheaper one that still covers it, or
    the most expensive that is not needed any more is taken back.

With `relaxed` a part of the last step is enough: never more than the best choice costs, so a lower bound. Where that is
less by more than `_WORTH` of what the stage takes, all choices are tried (`frontier`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farspan.planner.cost_model.colocation import FloatArray
from farspan.planner.partition_dp.remat.choices import Choice
from farspan.planner.partition_dp.remat.frontier import Alternative, Budget, Frontiers, NodeSet

__all__ = ["Steps", "make_steps"]

_WORTH = 1e-4
_Kind = tuple[float, float, float, bool]  # seconds per byte, bytes saved, seconds added, the only step of its node


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps of all nodes, for several numbers of micro-batches in flight (`flight` counts these), cheapest first.

    Attributes:
        saved_bytes: [flight, kind] what one step saves.
        extra_s: [flight, kind] what it adds.
        is_only: [flight, kind] its nodes have no other step: it may be taken out of order.
        of_prefix: [flight, prefix, kind] how many steps of that kind a prefix has.
        members: For each flight and kind the nodes, and the choice that the step leads to.
        nodes_of_prefix: [prefix, kind of node] how many nodes of that kind a prefix has.
        node_kinds: The nodes of each of these kinds: they have the same choices.
        frontiers: [flight] of these kinds.
        budget: Of the frontiers.
    """

    saved_bytes: FloatArray
    extra_s: FloatArray
    is_only: NDArray[np.bool_]
    of_prefix: FloatArray
    members: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]
    nodes_of_prefix: NDArray[np.intp]
    node_kinds: Sequence[Sequence[int]]
    frontiers: Sequence[Frontiers]
    budget: Budget

    def extra(
        self,
        start: int,
        ends: NDArray[np.intp],
        missing: FloatArray,
        without_s: FloatArray,
        *,
        relaxed: bool = False,
    ) -> FloatArray:
        """[flight, end] the seconds that steps add which save what is missing; infinite where all together do not.

        Args:
            start: The prefix where the stages begin.
            ends: Those where they end.
            missing: [flight, end] bytes to save; nothing is to be done from 0 down.
            without_s: [end] what the stages take without.
            relaxed: A lower bound.
        """
        extra = np.where(missing > 0, math.inf, 0.0)
        if not self.saved_bytes.shape[1]:
            return extra
        counts = self.of_prefix[:, ends] - self.of_prefix[:, start, None]
        can = (missing > 0) & ((counts * self.saved_bytes[:, None]).sum(axis=2) >= missing)
        flights, rows = np.nonzero(can)
        if len(flights):
            stages = _Knapsacks(self, flights, counts[flights, rows], missing[flights, rows])
            least = found = stages.total(relaxed=True)
            if not relaxed:
                found = stages.best()
                worth = (found - least > _WORTH * (without_s[rows] + least)) & np.isfinite(without_s[rows])
                for index in np.flatnonzero(worth):
                    flight, row = int(flights[index]), int(rows[index])
                    if self.budget.is_spent:
                        break
                    nodes = _node_set(self.nodes_of_prefix[ends[row]] - self.nodes_of_prefix[start])
                    exact = self.frontiers[flight].least(nodes, missing[flight, row, None])[0]
                    found[index] = min(found[index], exact)
            extra[flights, rows] = found
        return extra

    def chosen(self, flight: int, nodes: set[int], missing: float) -> dict[int, int]:
        """Returns, for one stage, the choice of each node that leaves its fastest one: what `extra` costs."""
        if missing <= 0:
            return {}
        mine = [[each for each in kind if each[0] in nodes] for kind in self.members[flight]]
        counts = np.zeros((1, self.saved_bytes.shape[1]))
        counts[0, : len(mine)] = [len(kind) for kind in mine]
        stage = _Knapsacks(self, np.array([flight]), counts, np.array([missing]))
        of_kind = [[node for node in kind if node in nodes] for kind in self.node_kinds]
        node_set = _node_set(np.array([len(each) for each in of_kind]))
        exact = self.frontiers[flight].chosen(node_set, missing)
        if exact is not None and self.frontiers[flight].least(node_set, np.array([missing]))[0] < stage.best()[0]:
            return {of_kind[kind].pop(): choice for kind, choice in exact}
        numbers = stage.numbers()
        return {node: choice for kind, number in zip(mine, numbers, strict=False) for node, choice in kind[:number]}


class _Knapsacks:
    """Several stages: of each the number of steps of each kind [stage, kind], and what is missing [stage]."""

    def __init__(self, steps: Steps, flights: NDArray[np.intp], counts: FloatArray, need: FloatArray) -> None:
        self.saved, self.extra, self.is_only = (
            steps.saved_bytes[flights],
            steps.extra_s[flights],
            steps.is_only[flights],
        )
        self.counts = counts
        self.here = np.arange(len(need))
        self.kinds: NDArray[np.intp] = np.arange(counts.shape[1])[None, :]
        saved = np.cumsum(counts * self.saved, axis=1)
        self.cost = np.cumsum(counts * self.extra, axis=1)
        self.last = np.minimum((saved < need[:, None]).sum(axis=1), counts.shape[1] - 1)
        self.of_last = counts[self.here, self.last]
        self.saved_last, self.extra_last = self.saved[self.here, self.last], self.extra[self.here, self.last]
        # What is missing with all steps before the last kind.
        self.still = need - (saved[self.here, self.last] - self.of_last * self.saved_last)
        self.taken = np.minimum(np.ceil(self.still / self.saved_last - 1e-12), self.of_last)

    def total(self, *, relaxed: bool = False) -> FloatArray:
        """Returns the seconds of steps in their order."""
        taken = self.still / self.saved_last if relaxed else self.taken
        return self.cost[self.here, self.last] - (self.of_last - taken) * self.extra_last

    def best(self) -> FloatArray:
        """Returns the same with the better of the two repairs."""
        total = self.total()
        instead, idle = self._instead()[0], self._idle()[0]
        return np.minimum(total, np.minimum(total - self.extra_last + instead, total - idle))

    def numbers(self) -> list[int]:
        """Returns for the first stage how many steps of each kind are taken."""
        numbers = np.where(self.kinds[0] < self.last[0], self.counts[0], 0.0)
        numbers[self.last[0]] = self.taken[0]
        (instead, other), (idle, unneeded) = self._instead(), self._idle()
        if instead[0] - self.extra_last[0] < min(0.0, -idle[0]):
            numbers[self.last[0]] -= 1
            numbers[other[0]] += 1
        elif idle[0] > 0:
            numbers[unneeded[0]] -= 1
        return [int(number) for number in numbers]

    def _instead(self) -> tuple[FloatArray, NDArray[np.intp]]:
        """Returns the cheapest later step that covers what is missing without the last one."""
        missing = self.still - (self.taken - 1) * self.saved_last
        covers = (self.kinds > self.last[:, None]) & (self.counts > 0) & self.is_only
        costs = np.where(covers & (self.saved >= missing[:, None]), self.extra, math.inf)
        return costs.min(axis=1), costs.argmin(axis=1)

    def _idle(self) -> tuple[FloatArray, NDArray[np.intp]]:
        """Returns the most expensive earlier step without which it is still enough."""
        spare = self.taken * self.saved_last - self.still
        idle = (self.kinds < self.last[:, None]) & (self.counts > 0) & self.is_only
        costs = np.where(idle & (self.saved <= spare[:, None]), self.extra, 0.0)
        return costs.max(axis=1), costs.argmax(axis=1)


def make_steps(
    choices: Sequence[Sequence[Choice]],
    group_of: Sequence[int],
    fastest: Sequence[int],
    flights: Sequence[int],
    members: NDArray[np.bool_],
) -> Steps:
    """Returns the steps for those numbers of micro-batches in flight.

    Args:
        choices: Of each node; a node without any has no steps.
        group_of: Of each node.
        fastest: Of each node the choice to start from.
        flights: Micro-batches.
        members: [prefix, group].
    """
    budget = Budget()
    of_flight = [_kinds(choices, fastest, in_flight) for in_flight in flights]
    node_kinds: dict[tuple[tuple[Choice, ...], int], list[int]] = {}
    for node, options in enumerate(choices):
        if len(options) > 1:
            node_kinds.setdefault((tuple(options), fastest[node]), []).append(node)
    of_group = np.zeros((members.shape[1], len(node_kinds)), dtype=np.intp)
    for number, nodes in enumerate(node_kinds.values()):
        np.add.at(of_group[:, number], [group_of[node] for node in nodes], 1)
    num_kinds = max(len(kinds) for kinds in of_flight)
    saved, extra = np.zeros((len(flights), num_kinds)), np.zeros((len(flights), num_kinds))
    is_only = np.zeros((len(flights), num_kinds), dtype=bool)
    has = np.zeros((len(flights), members.shape[1], num_kinds))
    for flight, kinds in enumerate(of_flight):
        for index, (kind, steps) in enumerate(kinds):
            saved[flight, index], extra[flight, index], is_only[flight, index] = kind[1:]
            for node, _ in steps:
                has[flight, group_of[node], index] += 1
    return Steps(
        saved_bytes=saved,
        extra_s=extra,
        is_only=is_only,
        of_prefix=members.astype(float) @ has,
        members=tuple(tuple(steps for _, steps in kinds) for kinds in of_flight),
        nodes_of_prefix=members.astype(np.intp) @ of_group,
        node_kinds=tuple(node_kinds.values()),
        frontiers=[
            Frontiers([_alternatives(*kind, in_flight) for kind in node_kinds], budget) for in_flight in flights
        ],
        budget=budget,
    )


def _node_set(counts: NDArray[np.intp]) -> NodeSet:
    return tuple((int(kind), int(counts[kind])) for kind in np.flatnonzero(counts))


def _alternatives(options: Sequence[Choice], fastest: int, in_flight: int) -> list[Alternative]:
    """Returns the fastest way, and those that save something."""
    least = options[fastest]
    ways = [
        Alternative(
            saved_bytes=least.memory(in_flight) - each.memory(in_flight),
            extra_s=each.time_s - least.time_s,
            choice=index,
        )
        for index, each in enumerate(options)
    ]
    return [way for way in ways if way.choice == fastest or way.saved_bytes > 0]


def _kinds(
    choices: Sequence[Sequence[Choice]], fastest: Sequence[int], in_flight: int
) -> list[tuple[_Kind, tuple[tuple[int, int], ...]]]:
    """Returns the kinds of steps in their order, and of each the nodes and the choices that it leads to."""
    kinds: dict[_Kind, list[tuple[int, int]]] = {}
    known: dict[tuple[tuple[Choice, ...], int], list[tuple[_Kind, int]]] = {}
    for node, options in enumerate(choices):
        if len(options) < 2:
            continue
        key = (tuple(options), fastest[node])
        if key not in known:
            known[key] = _hull(options, fastest[node], in_flight)
        for kind, choice in known[key]:
            kinds.setdefault(kind, []).append((node, choice))
    return [(kind, tuple(kinds[kind])) for kind in sorted(kinds)]


def _hull(options: Sequence[Choice], at: int, in_flight: int) -> list[tuple[_Kind, int]]:
    """Returns the steps of one node from choice `at` on, and where each leads."""
    steps: list[tuple[float, float, float, int]] = []
    while True:
        now = options[at]
        found = [
            ((each.time_s - now.time_s) / saved, -saved, each.time_s - now.time_s, index)
            for index, each in enumerate(options)
            if (saved := now.memory(in_flight) - each.memory(in_flight)) > 1e-9
        ]
        if not found:
            break
        steps.append(min(found))
        at = steps[-1][3]
    return [((ratio, -saved, extra, len(steps) == 1), index) for ratio, saved, extra, index in steps]
