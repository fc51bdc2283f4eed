"""Computes how short a step of a chain of nodes can be, over all cuts and all orders of devices: see
planner.bound.lower_bound.

For each choice of devices that the stages before a place have taken, the least that these keep the next one waiting:

    before[place, used]        forward[place, used]      forwards alone
                               waited[place, used]       and what comes back of backwards
    after[place, left]         both of the stages from there on, on the devices that are left

A stage from one place to another, on one more device, is possible within a step if all that the step must have time
for is shorter. A step may be that short if a sequence of such stages leads to the end of the chain. The least of each
sum is taken by itself: no more than what any one chain has. Sums before a place are first taken without what comes
after it; sums after it then over stages that have the time for what other devices do before them; and with these the
sums before it once more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farspan.planner.bound.devices import Devices, IntArray, Layer
from farspan.planner.cost_model.colocation import FloatArray

__all__ = ["Cuts", "Stages"]

_BLOCK = 512
"""States that are handled together: what is computed of them stays in the processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The stages of a chain that a class of devices may run: a device has the memory for one micro-batch.

    Attributes:
        starts: The place where each begins.
        ends: The place where it ends.
        forward_s: The least seconds of a forward.
        backward_s: Of a backward.
        returned_s: Of what stages before wait for in it.
        whole_s: Of both.
    """

    starts: IntArray
    ends: IntArray
    forward_s: FloatArray
    backward_s: FloatArray
    returned_s: FloatArray
    whole_s: FloatArray

    def at(self, numbers: IntArray) -> Stages:
        """Returns those of them."""
        return Stages(**{each.name: getattr(self, each.name)[numbers] for each in fields(self)})


class _Possible:
    """Stages of a class that can be within a step, and what there may be before and after each.

    Attributes:
        stages: Ordered by the place where they end, or begin.
        ahead_s: The most that forwards before it may take.
        waits_s: The most that these and what comes back of their backwards may take.
        ahead_and_after_s: The most that forwards before it, and both after it, may take.
        waits_and_after_s: The most that both may take, before it and after it.
    """

    def __init__(self, stages: Stages, step_s: float, num_micro_batches: int, *, by_end: bool) -> None:
        numbers = np.flatnonzero(num_micro_batches * stages.whole_s <= step_s)
        of = (stages.ends if by_end else stages.starts)[numbers]
        self.stages = found = stages.at(numbers[np.argsort(of, kind="stable")])
        self.ahead_s = step_s - num_micro_batches * found.whole_s
        self.waits_s = step_s - num_micro_batches * (found.forward_s + found.returned_s)
        self.ahead_and_after_s = step_s - found.forward_s - num_micro_batches * found.backward_s
        self.waits_and_after_s = step_s - found.forward_s - num_micro_batches * found.returned_s

    def within(self, ahead: FloatArray, waits: FloatArray, after: FloatArray | None) -> _Within:
        """Picks the stages that are possible with what is before and after them: [place, state]."""
        starts, ends = self.stages.starts, self.stages.ends
        may_be = ahead.min(axis=1)[starts] <= self.ahead_s
        if after is not None:
            may_be &= after.min(axis=1)[ends] <= self.ahead_and_after_s
        kept = np.flatnonzero(may_be)
        ahead, waits = ahead[starts[kept]], waits[starts[kept]]
        can_be = (ahead <= self.ahead_s[kept, None]) & (waits <= self.waits_s[kept, None])
        if after is not None:
            after = after[ends[kept]]
            can_be &= ahead + after <= self.ahead_and_after_s[kept, None]
            can_be &= waits + after <= self.waits_and_after_s[kept, None]
        return _Within(self.stages.at(kept), can_be, ahead, waits, after)


class _Within(NamedTuple):
    """Stages of a class; of each, by state, whether it can be, and what is before it and after it."""

    stages: Stages
    can_be: NDArray[np.bool_]
    ahead: FloatArray
    waits: FloatArray
    after: FloatArray | None

    def least(self, sums: FloatArray, more_s: FloatArray, places: IntArray) -> tuple[IntArray, FloatArray]:
        """Adds seconds of the stages to those sums: the least of each place, [place, state], and these places."""
        firsts = np.flatnonzero(np.diff(places, prepend=-1))
        every = np.where(self.can_be, sums + more_s[:, None], math.inf)
        return places[firsts], np.minimum.reduceat(every, firsts, axis=0)


class Cuts:
    """A chain of nodes.

    Args:
        stages: Of each class, those that there are.
        devices: How many there are of each class.
        most: The most stages.
        num_micro_batches: Of a step.
        forward_border_s: [class, place] the least that it takes to send what goes over a border there, if a device of
            that class sends or receives it; 0 at both ends.
        back_border_s: The same of its gradient.
        returns: Whether backwards follow from each other.
    """

    def __init__(
        self,
        stages: Sequence[Stages],
        devices: Devices,
        most: int,
        num_micro_batches: int,
        forward_border_s: FloatArray,
        back_border_s: FloatArray,
        *,
        returns: bool,
    ) -> None:
        self.stages, self.devices, self.num_micro_batches, self.returns = stages, devices, num_micro_batches, returns
        self.forward_border_s = forward_border_s
        self.border_s = forward_border_s + back_border_s if returns else forward_border_s
        self.shape = (forward_border_s.shape[1], devices.num_states)
        self.layers = devices.layers(most)
        self.all_layers = devices.layers(sum(devices.counts))

    def work(self, step_s: float) -> float:
        """Returns how many stages are tried for a step of so many seconds, each with every choice of devices."""
        num_stages = (np.count_nonzero(self.num_micro_batches * each.whole_s <= step_s) for each in self.stages)
        return float(self.devices.num_states * sum(num_stages))

    def may_take(self, step_s: float) -> bool:
        """Returns whether a step of so many seconds may be enough for some cut of the chain."""
        forward, waited = self._before(step_s)
        if not self.returns or not np.isfinite(forward[-1]).any():
            return bool(np.isfinite(forward[-1]).any())
        for sums in (forward, waited):
            self.devices.spread(sums)  # what others have left of the devices may be more than a stage after them has
        after = self._after(step_s, forward, waited)
        if not np.isfinite(after[0, -1]):
            return False
        del forward, waited
        return bool(np.isfinite(self._before(step_s, after)[0][-1]).any())

    def _before(self, step_s: float, after: FloatArray | None = None) -> tuple[FloatArray, FloatArray]:
        """[place, devices taken] the least forwards before it, and these with what comes back."""
        forward, waited = np.full(self.shape, math.inf), np.full(self.shape, math.inf)
        forward[0, 0] = waited[0, 0] = 0.0
        for number, possible, states, before in self._blocks(self.layers, step_s, by_end=True):
            left = None if after is None else after[:, self.devices.left(states)]
            those = possible.within(forward[:, before], waited[:, before], left)
            each, ends = those.stages, those.stages.ends
            if not len(ends):
                continue
            forth_and_back = each.forward_s + (each.returned_s if self.returns else 0.0)
            for found, sums, seconds, border_s in (
                (forward, those.ahead, each.forward_s, self.forward_border_s),
                (waited, those.waits, forth_and_back, self.border_s),
            ):
                _lower(found, states, *those.least(sums, seconds + border_s[number, ends], ends))
        return forward, waited

    def _after(self, step_s: float, forward: FloatArray, waited: FloatArray) -> FloatArray:
        """[place, devices left] the least forwards and what comes back of the stages from there on."""
        found = np.full(self.shape, math.inf)
        found[-1] = 0.0
        for number, possible, states, later in self._blocks(self.all_layers, step_s, by_end=False):
            others = self.devices.left(states)
            those = possible.within(forward[:, others], waited[:, others], found[:, later])
            each, starts = those.stages, those.stages.starts
            if len(starts) and those.after is not None:
                seconds = each.forward_s + each.returned_s + self.border_s[number, starts]
                _lower(found, states, *those.least(those.after, seconds, starts))
        return found

    def _blocks(
        self, layers: Sequence[Layer], step_s: float, *, by_end: bool
    ) -> Iterator[tuple[int, _Possible, IntArray, IntArray]]:
        """Returns for each class its stages, some states that have a device of it, and these without it; few devices
        first."""
        of_class = [_Possible(each, step_s, self.num_micro_batches, by_end=by_end) for each in self.stages]
        for layer in layers:
            for number, (possible, (states, before)) in enumerate(zip(of_class, layer, strict=True)):
                for start in range(0, len(states), _BLOCK):
                    block = slice(start, start + _BLOCK)
                    yield number, possible, states[block], before[block]


def _lower(found: FloatArray, states: IntArray, places: IntArray, least: FloatArray) -> None:
    """Puts what is less in the place of what was found."""
    at = np.ix_(places, states)
    found[at] = np.minimum(found[at], least)
