"""How far along a row of nodes stages can come within a step: see planner.bound.lower."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farspan.planner.costed.problem import FloatArray

__all__ = ["MAX_STATES", "Row", "Work"]

MAX_STATES = 300_000
"""Numbers of devices of all classes that are looked at."""
_CLOSE = 1e-9
_IntArray = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The least that a node takes on a device, however it is run; infinite where it may not run.

    Attributes:
        whole_s: Forward and backward.
        waited_s: Without gradients of weights.
        forward_s: Forward alone.
        forward_share: Of the whole, that part.
        backward_s: Backward alone.
        returned_s: Backward without gradients of weights.
        memory_bytes: With one micro-batch in flight.
    """

    whole_s: float
    waited_s: float
    forward_s: float
    forward_share: float
    backward_s: float
    returned_s: float
    memory_bytes: float


class Row:
    """Nodes of which each follows from the one before.

    Args:
        nodes: In order, for each class of devices the least that it takes.
        counts: Of each class, how many devices there are.
        limits: Of each class, the memory of a device, in bytes.
        most: The most stages.
        num_micro_batches: Of a step.
        border_s: The least that it takes from one stage to the next, forward; and back, where backwards follow.
        returns: Whether backwards follow from each other too.
    """

    def __init__(
        self,
        nodes: Sequence[Sequence[Work]],
        counts: Sequence[int],
        limits: Sequence[float],
        most: int,
        num_micro_batches: int,
        border_s: tuple[float, float],
        *,
        returns: bool,
    ) -> None:
        self.num_nodes, self.num_micro_batches = len(nodes), num_micro_batches
        classes = range(len(counts))
        self.forward = _sums([min(each.forward_s for each in row) for row in nodes])
        self.waited = _sums([min(each.waited_s for each in row) if returns else 0.0 for row in nodes])
        self.whole_on = [_sums([row[number].whole_s for row in nodes]) for number in classes]
        self.waited_on = [_sums([row[number].waited_s for row in nodes]) for number in classes]
        self.forward_border_s, self.border_s = border_s[0], sum(border_s) if returns else border_s[0]
        self.at_most = [
            np.minimum(
                _before_refused([math.isfinite(row[number].whole_s) for row in nodes]),
                _last(sizes := _sums([row[number].memory_bytes for row in nodes]), sizes + limits[number]),
            )
            for number in classes
        ]
        """[class][start] where a stage may end at the latest that has to run there, and to fit."""
        self.layers = _layers(counts, most)
        self.num_states = math.prod(count + 1 for count in counts)

    def may_take(self, step_s: float) -> bool:
        """Returns whether stages may reach the end of the row within a step of so many seconds."""
        reach: _IntArray = np.zeros(self.num_states, dtype=np.intp)
        for num_before, layer in enumerate(self.layers):
            for number, (states, before) in enumerate(layer):
                ends = self._ends(number, num_before, step_s)
                reach[states] = np.maximum(reach[states], ends[reach[before]])
            if any((reach[states] == self.num_nodes).any() for states, _ in layer):
                return True
        return False

    def _ends(self, number: int, num_before: int, step_s: float) -> _IntArray:
        """[start] where a stage on that class ends at the latest, with so many before it."""
        ends = self.at_most[number]
        for waits, border_s, seconds in (
            (self.forward, self.forward_border_s, self.whole_on[number]),
            (self.waited, self.border_s, self.waited_on[number]),
        ):
            left_s = step_s - waits - num_before * border_s
            ends = np.minimum(ends, _last(seconds, seconds + left_s / self.num_micro_batches))
        return np.maximum(ends, np.arange(len(ends)))


def _layers(counts: Sequence[int], most: int) -> list[list[tuple[_IntArray, _IntArray]]]:
    """For 1, 2, .. stages, by class: the numbers of devices taken that have one of it, and each without that one."""
    taken = np.indices([count + 1 for count in counts]).reshape(len(counts), -1)
    strides = [math.prod(count + 1 for count in counts[number + 1 :]) for number in range(len(counts))]
    totals = taken.sum(axis=0)
    found: list[list[tuple[_IntArray, _IntArray]]] = []
    for total in range(1, min(most, sum(counts)) + 1):
        states = np.flatnonzero(totals == total)
        of_class = [states[taken[number, states] > 0] for number in range(len(counts))]
        found.append([(each, each - stride) for each, stride in zip(of_class, strides, strict=True)])
    return found


def _before_refused(may_run: Sequence[bool]) -> _IntArray:
    """[start] the place before which the first node from there on lies that may not run."""
    ends = [len(may_run)]
    for at in reversed(range(len(may_run))):
        ends.append(ends[-1] if may_run[at] else at)
    return np.array(ends[::-1])


def _last(values: FloatArray, most: FloatArray) -> _IntArray:
    """[start] the last place with at most that value."""
    return np.searchsorted(values, most * (1 + _CLOSE), side="right") - 1


def _sums(seconds: Sequence[float]) -> FloatArray:
    """Before each node, and after the last; what is infinite is left out."""
    return np.array([0.0, *itertools.accumulate(each if math.isfinite(each) else 0.0 for each in seconds)])
