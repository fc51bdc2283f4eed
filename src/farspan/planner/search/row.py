"""How far along a row of nodes stages can come within a step: see planner.answer.bound."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MAX_STATES", "Row", "Work"]

MAX_STATES = 1_000
"""Numbers of devices of all classes that are looked at."""
_CLOSE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The least that a node takes on a device, however it is run; infinite where it may not run.

    Attributes:
        whole_s: Forward and backward.
        waited_s: Without gradients of weights.
        forward_s: Forward alone.
        forward_share: Of the whole, that part.
    """

    whole_s: float
    waited_s: float
    forward_s: float
    forward_share: float


class Row:
    """Nodes of which each follows from the one before.

    Args:
        nodes: In order, for each class of devices the least that it takes.
        counts: Of each class, how many devices there are.
        most: The most stages.
        num_micro_batches: Of a step.
        returns: Whether backwards follow from each other too.
    """

    def __init__(
        self,
        nodes: Sequence[Sequence[Work]],
        counts: Sequence[int],
        most: int,
        num_micro_batches: int,
        *,
        returns: bool,
    ) -> None:
        self.num_nodes, self.num_micro_batches = len(nodes), num_micro_batches
        self.forward = _sums([min(each.forward_s for each in row) for row in nodes])
        self.waited = _sums([min(each.waited_s for each in row) if returns else 0.0 for row in nodes])
        self.whole_on = [_sums([row[number].whole_s for row in nodes]) for number in range(len(counts))]
        self.waited_on = [_sums([row[number].waited_s for row in nodes]) for number in range(len(counts))]
        self.refused = [
            [at for at, row in enumerate(nodes) if not math.isfinite(row[number].whole_s)]
            for number in range(len(counts))
        ]
        every = itertools.product(*(range(count + 1) for count in counts))
        self.states = [state for state in every if 0 < sum(state) <= most]

    def least_step(self, known_s: float) -> float:
        """Seconds in which not all nodes can be done, or just so; no less than are known."""
        if self.reaches(known_s):
            return known_s
        low, high = known_s, 2 * known_s
        while not self.reaches(high):
            low, high = high, 2 * high
            if not math.isfinite(high):
                return known_s  # there is no plan
        while high - low > _CLOSE * low:
            middle = (low + high) / 2
            low, high = (low, middle) if self.reaches(middle) else (middle, high)
        return low

    def reaches(self, step_s: float) -> bool:
        """Whether a step of that length may be enough."""
        reach: dict[tuple[int, ...], int] = {}
        for state in self.states:
            farthest = 0
            for number, count in enumerate(state):
                if count:
                    before = reach.get((*state[:number], count - 1, *state[number + 1 :]), 0)
                    farthest = max(farthest, self._end(before, number, step_s))
            if farthest == self.num_nodes:
                return True
            reach[state] = farthest
        return False

    def _end(self, start: int, number: int, step_s: float) -> int:
        """Where a stage on that class ends at the latest."""
        ends = [self.num_nodes, *self.refused[number][bisect_right(self.refused[number], start - 1) :][:1]]
        for waits, seconds in ((self.forward, self.whole_on[number]), (self.waited, self.waited_on[number])):
            until = seconds[start] + (step_s - waits[start]) / self.num_micro_batches
            ends.append(max(start, bisect_right(seconds, until) - 1))
        return min(ends)


def _sums(seconds: Sequence[float]) -> list[float]:
    """Before each node, and after the last; what is infinite is left out."""
    return [0.0, *itertools.accumulate(each if math.isfinite(each) else 0.0 for each in seconds)]
