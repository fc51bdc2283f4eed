"""Enumerates all ways to take some of a cluster's devices: how many of each class, as numbers ("states")."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Devices", "IntArray", "Layer"]

IntArray = NDArray[np.intp]
Layer = list[tuple[IntArray, IntArray]]
"""For each class the states that have a device of it, and each without that one."""


class Devices:
    """The states: with 2 devices of a class and 1 of another 0 0, 0 1, 1 0, 1 1, 2 0, 2 1, in that order.

    Args:
        counts: Of each class, how many devices there are.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        self.num_states = math.prod(count + 1 for count in counts)
        self.strides = [math.prod(count + 1 for count in counts[number + 1 :]) for number in range(len(counts))]
        """[class] by how much the number of a state grows with a device of it."""
        self.taken: IntArray = np.indices([count + 1 for count in counts]).reshape(len(counts), -1)
        """[class, state] how many devices of it are taken."""

    def layers(self, most: int) -> list[Layer]:
        """Returns the states of 1, 2, .. `most` devices."""
        totals = self.taken.sum(axis=0)
        found: list[Layer] = []
        for total in range(1, min(most, sum(self.counts)) + 1):
            states = np.flatnonzero(totals == total)
            of_class = [states[those[states] > 0] for those in self.taken]
            found.append([(each, each - stride) for each, stride in zip(of_class, self.strides, strict=True)])
        return found

    def left(self, states: IntArray) -> IntArray:
        """Returns the states of all devices that those do not have."""
        return self.num_states - 1 - states

    def spread(self, values: NDArray[np.float64]) -> None:
        """Gives each state the least value of all that have no other devices than it has, in place: [.., state]."""
        by_class = values.reshape(*values.shape[:-1], *(count + 1 for count in self.counts))
        for axis in range(values.ndim - 1, by_class.ndim):
            np.minimum.accumulate(by_class, axis=axis, out=by_class)
