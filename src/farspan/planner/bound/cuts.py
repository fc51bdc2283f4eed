"""How short a step of a row of nodes can be, over all cuts and all orders of devices: see planner.bound.lower.

For each choice of devices that the stages before a place have taken, the least that these keep the next one waiting:

    before[used, place]        forward[used, place]      forwards alone
                               waited[used, place]       and what comes back of backwards
    after[left, place]         both of the stages from there on, on the devices that are left

A stage from one place to another, on one more device, is possible within a step if all that the step must have time
for is shorter. A step may be that short if a chain of such stages leads to the end of the row. The least of each sum is
taken by itself: no more than what any one chain has. Sums over later stages are first taken over all stages that could
run within a step, then over those that also have the time for what comes before them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farspan.planner.costed.problem import FloatArray

__all__ = ["MAX_WORK", "Cuts", "Stages"]

MAX_WORK = 2e6
"""Stages that are looked at for one length of a step: devices taken, a class, two places."""
_State = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """All stages of a row on one class of devices, by the places where they begin and end.

    Attributes:
        can_be: [place, place] whether the nodes may run there, and a device has the memory for one micro-batch.
        forward_s: The least seconds of a forward.
        backward_s: Of a backward.
        returned_s: Of what stages before wait for in it.
        whole_s: Of both.
    """

    can_be: NDArray[np.bool_]
    forward_s: FloatArray
    backward_s: FloatArray
    returned_s: FloatArray
    whole_s: FloatArray


class Cuts:
    """A row of nodes.

    Args:
        stages: Of each class.
        counts: Of each class, how many devices there are.
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
        counts: Sequence[int],
        most: int,
        num_micro_batches: int,
        forward_border_s: FloatArray,
        back_border_s: FloatArray,
        *,
        returns: bool,
    ) -> None:
        self.stages, self.counts, self.num_micro_batches, self.returns = stages, counts, num_micro_batches, returns
        self.forward_border_s = forward_border_s
        self.border_s = forward_border_s + back_border_s if returns else forward_border_s
        every = sorted(itertools.product(*(range(count + 1) for count in counts)), key=sum)
        self.every = every
        self.states = [state for state in every if sum(state) <= most]

    def _after(self, can_be: Sequence[NDArray[np.bool_]]) -> dict[_State, FloatArray]:
        """By the devices that are left [place], forwards and what comes back from there on, with the border there."""
        num_places = self.border_s.shape[1]
        found: dict[_State, FloatArray] = {}
        for left in self.every:
            best = np.full(num_places, math.inf)
            best[-1] = 0.0
            for number, each in enumerate(self.stages):
                if left[number]:
                    seconds = each.forward_s + (each.returned_s if self.returns else 0.0) + found[_less(left, number)]
                    seconds += self.border_s[number][:, None]
                    best = np.minimum(best, np.where(can_be[number], seconds, math.inf).min(axis=1))
            found[left] = best
        return found

    def may_take(self, step_s: float) -> bool:
        """Returns whether a step of so many seconds may be enough for some cut of the row."""
        can_be = [each.can_be & (self.num_micro_batches * each.whole_s <= step_s) for each in self.stages]
        after = self._after(can_be)
        forward = self._forward(step_s, can_be, after)
        if not self._is_cut(forward):
            return False
        # Of what comes after a stage, only such stages count as can follow what comes before them.
        ahead = np.min(list(forward.values()), axis=0)[:, None]
        can_be = [
            those & (ahead + self.num_micro_batches * each.whole_s <= step_s)
            for those, each in zip(can_be, self.stages, strict=True)
        ]
        return self._is_cut(self._forward(step_s, can_be, self._after(can_be)))

    def _is_cut(self, forward: Mapping[_State, FloatArray]) -> bool:
        return any(math.isfinite(each[-1]) for each in forward.values())

    def _forward(
        self, step_s: float, can_be: Sequence[NDArray[np.bool_]], after: Mapping[_State, FloatArray]
    ) -> dict[_State, FloatArray]:
        """By the devices that are taken [place], the least forwards before it, of stages that are possible."""
        num_places, times = self.border_s.shape[1], self.num_micro_batches
        start = np.full(num_places, math.inf)
        start[0] = 0.0
        forward = {state: start.copy() for state in self.states[:1]}
        waited = {state: start.copy() for state in self.states[:1]}
        for state in self.states[1:]:
            forward[state], waited[state] = (np.full(num_places, math.inf) for _ in range(2))
            for number, each in enumerate(self.stages):
                if not state[number]:
                    continue
                before = _less(state, number)
                left = tuple(count - used for count, used in zip(self.counts, state, strict=True))
                ahead, waits = forward[before][:, None], waited[before][:, None]
                possible = can_be[number] & (ahead + times * each.whole_s <= step_s)
                forth_and_back = each.forward_s + (each.returned_s if self.returns else 0.0)
                possible &= waits + times * (each.forward_s + each.returned_s) <= step_s
                if self.returns:
                    rest = each.forward_s + after[left]
                    possible &= ahead + rest + times * each.backward_s <= step_s
                    possible &= waits + rest + times * each.returned_s <= step_s
                for found, source, seconds, border_s in (
                    (forward[state], ahead, each.forward_s, self.forward_border_s),
                    (waited[state], waits, forth_and_back, self.border_s),
                ):
                    sums = np.where(possible, source + seconds + border_s[number], math.inf)
                    np.minimum(found, sums.min(axis=0), out=found)
        return forward


def _less(state: _State, number: int) -> _State:
    return (*state[:number], state[number] - 1, *state[number + 1 :])
