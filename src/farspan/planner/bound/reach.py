"""Computes how far along a chain of nodes stages can come within a step: see planner.bound.lower_bound."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from farspan.planner.bound.devices import Devices, IntArray
from farspan.planner.cost_model.colocation import FloatArray

__all__ = ["MAX_STATES", "Reach", "Work"]

MAX_STATES = 300_000
"""Limit on the states of devices that are tried."""
_CLOSE = 1e-9


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


class Reach:
    """Nodes of which each follows from the one before.

    Args:
        nodes: In order, for each class of devices the least that it takes.
        devices: How many there are of each class.
        limits: Of each class, the memory of a device, in bytes.
        most: The most stages.
        num_micro_batches: Of a step.
        border_s: The least that it takes from one stage to the next, forward; and back, where backwards follow.
        returns: Whether backwards follow from each other too.
    """

    def __init__(
        self,
        nodes: Sequence[Sequence[Work]],
        devices: Devices,
        limits: Sequence[float],
        most: int,
        num_micro_batches: int,
        border_s: tuple[float, float],
        *,
        returns: bool,
    ) -> None:
        self.num_nodes, self.num_micro_batches = len(nodes), num_micro_batches
        self.devices, counts = devices, devices.counts
        classes = range(len(counts))
        self.forward = _Fill([[each.forward_s for each in row] for row in nodes], counts)
        self.waited = _Fill([[each.waited_s if returns else 0.0 for each in row] for row in nodes], counts)
        self.most_forward = [
            max((row[number].forward_s / row[number].whole_s for row in nodes if _is_work(row[number])), default=1.0)
            for number in classes
        ]
        """[class] the share of a node's seconds that its forward takes at most."""
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
        self.layers = devices.layers(most)

    def may_take(self, step_s: float) -> bool:
        """Returns whether stages may reach the end of the chain within a step of so many seconds."""
        return self.classes_within(step_s) is not None

    def classes_within(self, step_s: float) -> list[int] | None:
        """Returns the classes of the devices of some stages, in order, that may reach the end of the chain within
        a step of so many seconds, as few as possible; None if there are none.
        """
        reach: IntArray = np.zeros(self.devices.num_states, dtype=np.intp)
        most_s = step_s / self.num_micro_batches  # of a stage
        forward = self.forward.least([most_s * share for share in self.most_forward])
        waited = self.waited.least([most_s] * len(self.most_forward))
        ends: list[list[IntArray]] = []
        for num_before, layer in enumerate(self.layers):
            left_s = step_s - forward - num_before * self.forward_border_s
            left_waited_s = step_s - waited - num_before * self.border_s
            ends.append([self._ends(number, left_s, left_waited_s) for number in range(len(layer))])
            for those, (states, before) in zip(ends[-1], layer, strict=True):
                reach[states] = np.maximum(reach[states], those[reach[before]])
            for states, _ in layer:
                last = states[reach[states] == self.num_nodes]
                if len(last):
                    return self._classes_to(int(last[0]), reach, ends)
        return None

    def _classes_to(self, state: int, reach: IntArray, ends: Sequence[Sequence[IntArray]]) -> list[int]:
        """Returns the classes of the stages that come as far as `reach` says with the devices of that state."""
        found: list[int] = []
        for of_class in reversed(ends):
            for number, those in enumerate(of_class):
                before = state - self.devices.strides[number]
                if self.devices.taken[number, state] and those[reach[before]] == reach[state]:
                    found.append(number)
                    state = before
                    break
        return found[::-1]

    def _ends(self, number: int, left_s: FloatArray, left_waited_s: FloatArray) -> IntArray:
        """[start] where a stage on that class ends at the latest that begins there or before; it has so many seconds
        where it begins.
        """
        ends = self.at_most[number]
        for seconds, left in ((self.whole_on[number], left_s), (self.waited_on[number], left_waited_s)):
            ends = np.minimum(ends, _last(seconds, seconds + left / self.num_micro_batches))
        return np.maximum.accumulate(np.maximum(ends, np.arange(len(ends))))


class _Fill:
    """The least time that a micro-batch takes through the nodes before a place, whatever devices they are on.

    Args:
        seconds: [node][class] of a node.
        counts: Of each class, how many devices there are.
    """

    def __init__(self, seconds: Sequence[Sequence[float]], counts: Sequence[int]) -> None:
        least = [min(row) for row in seconds]
        self.work = _sums(least)
        self.counts = counts
        self.speeds = [
            max((most / row[number] for most, row in zip(least, seconds, strict=True) if row[number] > 0), default=1.0)
            for number in range(len(counts))
        ]
        """[class] how much of the least work it does in a second, at most."""

    def least(self, most_s: Sequence[float]) -> FloatArray:
        """[place] the seconds, if each device of a class takes `most_s` of them at most: the fastest come first."""
        work, taken_s = [0.0], [0.0]
        for number in sorted(range(len(self.speeds)), key=lambda number: -self.speeds[number]):
            if self.speeds[number] > 0:
                taken_s.append(taken_s[-1] + self.counts[number] * most_s[number])
                work.append(work[-1] + self.counts[number] * most_s[number] * self.speeds[number])
        if not math.isfinite(work[-1]):
            return self.work
        return np.interp(self.work, work, taken_s)


def _is_work(work: Work) -> bool:
    return 0 < work.whole_s < math.inf


def _before_refused(may_run: Sequence[bool]) -> IntArray:
    """[start] the place before which the first node from there on lies that may not run."""
    ends = [len(may_run)]
    for at in reversed(range(len(may_run))):
        ends.append(ends[-1] if may_run[at] else at)
    return np.array(ends[::-1])


def _last(values: FloatArray, most: FloatArray) -> IntArray:
    """[start] the last place with at most that value."""
    return np.searchsorted(values, most * (1 + _CLOSE), side="right") - 1


def _sums(seconds: Sequence[float]) -> FloatArray:
    """Returns the sums before each node, and after the last; what is infinite is left out."""
    return np.array([0.0, *itertools.accumulate(each if math.isfinite(each) else 0.0 for each in seconds)])
