"""The least seconds for each number of bytes saved, over all choices of a set of nodes: exact.

A state is what some choice of each node saves and costs, summed. Nodes are added one by one, and of all states only
those are kept that no other one beats in both: for blocks alike these are as many as blocks. A set that has been
extended is kept, so the stages of one start, each a node longer than the one before, take one extension each. Where a
set has more than `_MOST_STATES`, some are left out, and it may miss the best; once `_MOST_WORK` states have been made,
no further sets are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from farspan.planner.cost_model.colocation import FloatArray

__all__ = ["Alternative", "Budget", "Frontiers", "NodeSet"]

NodeSet = tuple[tuple[int, int], ...]
"""Kinds of nodes in rising order, and of each how many."""

_MOST_STATES = 512
_MOST_WORK = 100_000
_LOOKUP_WORK = 50
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A way to run a node, against its fastest: bytes saved, seconds added, and its number among the node's choices."""

    saved_bytes: float
    extra_s: float
    choice: int


@dataclass(frozen=True, slots=True)
class _Frontier:
    """Both rise from state to state."""

    saved_bytes: FloatArray
    extra_s: FloatArray

    def first(self, missing: FloatArray) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        """Returns the cheapest states that save so much; one past the last where none does."""
        return np.searchsorted(self.saved_bytes, missing * (1 - _ROUNDING))


class Budget:
    """The work that is left for all sets of nodes of one search."""

    def __init__(self) -> None:
        self._left = _MOST_WORK

    @property
    def is_spent(self) -> bool:
        return self._left <= 0

    def spend(self, work: int) -> bool:
        """Takes so much from the budget, and returns whether anything had been left in it."""
        self._left -= work
        return self._left + work > 0


class Frontiers:
    """The frontiers of seconds against bytes for one number of micro-batches in flight.

    Args:
        kinds: Of each kind of node its ways to run, the fastest among them.
        budget: For this and others.
    """

    def __init__(self, kinds: Sequence[Sequence[Alternative]], budget: Budget) -> None:
        self._kinds, self._budget = kinds, budget
        self._known: dict[NodeSet, _Frontier] = {(): _Frontier(np.zeros(1), np.zeros(1))}

    def least(self, nodes: NodeSet, missing: FloatArray) -> FloatArray:
        """Returns the seconds that saving so many bytes takes; infinite where it cannot be, or would be too much
        work."""
        frontier = self._frontier(nodes)
        if frontier is None:
            return np.full(len(missing), math.inf)
        return np.append(frontier.extra_s, math.inf)[frontier.first(missing)]

    def chosen(self, nodes: NodeSet, missing: float) -> list[tuple[int, int]] | None:
        """Returns for each node (its kind, the number of its choice) of what `least` costs; None where that is
        infinite."""
        frontier = self._frontier(nodes)
        at = 0 if frontier is None else int(frontier.first(np.array([missing]))[0])
        if frontier is None or at == len(frontier.extra_s):
            return None
        saved, extra = frontier.saved_bytes[at], frontier.extra_s[at]
        found: list[tuple[int, int]] = []
        while nodes:
            kind, before = nodes[-1][0], _without_one(nodes)
            earlier = self._known[before]
            ways = self._kinds[kind]
            steps = np.array([[way.saved_bytes, way.extra_s] for way in ways])
            same = (earlier.saved_bytes + steps[:, :1] == saved) & (earlier.extra_s + steps[:, 1:] == extra)
            way, state = (int(each[0]) for each in np.nonzero(same))
            found.append((kind, ways[way].choice))
            saved, extra = earlier.saved_bytes[state], earlier.extra_s[state]
            nodes = before
        return found

    def _frontier(self, nodes: NodeSet) -> _Frontier | None:
        may_extend = self._budget.spend(_LOOKUP_WORK)
        missing: list[NodeSet] = []
        while nodes not in self._known:
            missing.append(nodes)
            nodes = _without_one(nodes)
        if missing and not may_extend:
            return None
        frontier = self._known[nodes]
        for each in reversed(missing):
            frontier = self._known[each] = _extend(frontier, self._kinds[each[-1][0]])
            self._budget.spend(len(frontier.extra_s))
        return frontier


def _without_one(nodes: NodeSet) -> NodeSet:
    """Returns the set without a node of its last kind."""
    kind, count = nodes[-1]
    return (*nodes[:-1], (kind, count - 1)) if count > 1 else nodes[:-1]


def _extend(frontier: _Frontier, ways: Sequence[Alternative]) -> _Frontier:
    saved = np.concatenate([frontier.saved_bytes + way.saved_bytes for way in ways])
    extra = np.concatenate([frontier.extra_s + way.extra_s for way in ways])
    order = np.lexsort((extra, -saved))
    saved, extra = saved[order], extra[order]
    least_before = np.minimum.accumulate(np.concatenate([[math.inf], extra[:-1]]))
    kept = np.flatnonzero(extra < least_before)[::-1]
    if len(kept) > _MOST_STATES:
        kept = kept[np.linspace(0, len(kept) - 1, _MOST_STATES).round().astype(int)]
    return _Frontier(saved[kept], extra[kept])
