"""Computes what crosses the borders of a stage, over any lattice of prefixes.

The values that leave or enter a stage between prefixes A and B, with X(A) those with pins on both sides of A:

    crossing(B - A) = crossing(B) + sum over v in X(A) of cost(v) ([v within B] - [v has no pin in B - A])

so only the few values of X(A) are read, for all ends B of A at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from farspan.planner.cost_model.colocation import FloatArray
from farspan.planner.partition_dp.chain import IntArray
from farspan.planner.partition_dp.lattice import Lattice

__all__ = ["Crossings"]


class Crossings:
    """The costs of the values that cross the borders of stages.

    Args:
        lattice: The prefixes.
        pins: Of each value.
        costs: [value, column]: any number of costs of each.
    """

    def __init__(self, lattice: Lattice, pins: Sequence[Sequence[int]], costs: FloatArray) -> None:
        self._lattice = lattice
        self._costs = costs
        self._masks = [sum(1 << pin for pin in each) for each in pins]
        self._open = self._open_values(lattice, pins)
        self.of_prefix: FloatArray = np.array([costs[values].sum(axis=0) for values in self._open])  # [prefix, column]

    def between(self, start: int, ends: IntArray) -> FloatArray:
        """[end, column]: what leaves or enters the stage from `start` to each of `ends`."""
        moved = self.of_prefix[ends]
        prefix, words = self._lattice.prefixes[start], self._lattice.words
        for value in self._open[start]:
            mask = self._masks[value]
            inside = np.ones(len(ends), dtype=bool)  # all its pins are in the end
            beyond = np.ones(len(ends), dtype=bool)  # none of its pins is in the stage
            for word in range(words.shape[1]):
                bits = np.uint64(mask >> 64 * word & (1 << 64) - 1)
                if bits:
                    outside = np.uint64((mask & ~prefix) >> 64 * word & (1 << 64) - 1)
                    there = words[ends, word]
                    inside &= (there & bits) == bits
                    beyond &= (there & outside) == 0
            moved = moved + (inside.astype(float) - beyond)[:, None] * self._costs[value]
        return np.maximum(moved, 0.0)

    def _open_values(self, lattice: Lattice, pins: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns for each prefix the values with pins on both sides of it."""
        if not pins:
            return [[] for _ in lattice.prefixes]
        found: list[list[int]] = []
        pairs = np.array([(value, pin) for value, each in enumerate(pins) for pin in each])
        sizes = np.array([len(each) for each in pins])
        firsts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
        for row in lattice.members():
            inside = np.add.reduceat(row[pairs[:, 1]].astype(np.int64), firsts)
            found.append(np.flatnonzero((inside > 0) & (inside < sizes)).tolist())
        return found
