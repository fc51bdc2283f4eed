"""What a stage costs each device class by the objective max-load, over any lattice of prefixes."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from copy import copy

import numpy as np
from benchmarks.planner_placement.placement.problem import Problem

from farspan.planner.cost_model.bounds import best_weights
from farspan.planner.cost_model.colocation import FloatArray
from farspan.planner.partition_dp.chain import IntArray, StageOption
from farspan.planner.partition_dp.crossings import Crossings
from farspan.planner.partition_dp.lattice import Lattice

__all__ = ["OutOfTimeError", "PlacementLoads"]

_MOST_CAPACITIES = 1_000_000
"""Numbers of devices of all classes together that are looked at one by one."""


class OutOfTimeError(Exception):
    """The search was to end before it could say which chain is the best."""


class PlacementLoads:
    """Loads of stages of one device each, by the objective max-load.

    Args:
        problem: What to place.
        lattice: The prefixes between which stages lie.
        upper: Stages of larger load are of no interest: what cannot be part of a chain without such is left out.
        until: When the search is to end, on the clock of `time.monotonic`.
    """

    def __init__(self, problem: Problem, lattice: Lattice, *, upper: float = math.inf, until: float = math.inf) -> None:
        self.problem = problem
        self.until = until
        self.lattice = lattice
        self.num_prefixes = len(lattice.prefixes)
        self.num_depths = 1
        self._classes: Sequence[int] = range(len(problem.counts))
        self.options: Sequence[StageOption] = [StageOption(device_class=index) for index in self._classes]
        members = lattice.members()
        finite = np.isfinite(problem.time_s)
        self._work = members @ np.where(finite, problem.time_s, 0.0)  # [prefix, class]
        self._refused = members @ (~finite).astype(float)
        self._memory = members @ problem.memory_bytes
        self._crossings = Crossings(lattice, problem.pins, problem.cost_s)
        self._is_open = self._band(upper)

    def ends(self, start: int) -> IntArray:
        if time.monotonic() > self.until:
            raise OutOfTimeError
        if not self._is_open[start]:
            return self._by_share[:0]
        low, high = np.searchsorted(
            self._shares, (self._share[start] - self._reach * 1e-9, self._share[start] + self._reach)
        )
        later = self.lattice.within(start, self._by_share[low:high])
        return later[later != start]

    def loads(self, start: int, ends: IntArray) -> list[FloatArray]:
        load = self._work[ends] - self._work[start] + self._crossings.between(start, ends)
        memory = self._memory[ends] - self._memory[start]
        load[self._refused[ends] - self._refused[start] > 0] = math.inf
        load[memory[:, None] > self.problem.limits[None, :]] = math.inf
        return [load[:, index, None] for index in self._classes]

    def only(self, device_class: int) -> PlacementLoads:
        """The same with stages on that class alone, as class 0."""
        other = copy(self)
        other._classes = [device_class]
        other.options = [StageOption(device_class=0)]
        return other

    def _band(self, upper: float) -> np.ndarray:
        """Which prefixes some devices could reach, and the others finish, without a load above `upper`.

        By the shares of the bound: a stage on class c with a load of at most `upper` has at most w(c) upper of them.
        """
        weights, work = best_weights(self.problem.time_s, self.problem.counts)
        before = self.lattice.members() @ work
        after = before[-1] - before
        is_open = np.ones(self.num_prefixes, dtype=bool)
        self._reach = float(before[-1]) + 1.0
        counts = self.problem.counts
        if math.isfinite(upper) and math.prod(count + 1 for count in counts) <= _MOST_CAPACITIES:
            amounts = ((np.arange(count + 1) * weight).tolist() for count, weight in zip(counts, weights, strict=True))
            capacity = np.array([sum(chosen) for chosen in itertools.product(*amounts)])
            reach = upper * (1 + 1e-9)
            is_open[:] = False
            for have in np.unique(capacity):
                is_open |= (before <= have * reach) & (after <= (capacity.max() - have) * reach)
            self._reach = float(weights.max()) * reach
        self._share = before
        open_prefixes = np.flatnonzero(is_open)
        self._by_share: IntArray = open_prefixes[np.argsort(before[open_prefixes], kind="stable")]
        self._shares = before[self._by_share]
        return is_open
