"""Free placements by simulated annealing: any group on any device, also where that makes stages non-contiguous.

The energy is what the loads exceed a target by, plus a little of all loads, so that among placements alike in the
first the one that moves less data is better. The target lies a little below the best max-load so far and follows it.
A move takes a group to a device on which a neighbour lies, or exchanges it with a group from there, or takes some
groups that hang together; only the values of the groups moved are looked at.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

from benchmarks.planner_placement.placement.problem import Problem

__all__ = ["Placing", "anneal"]

_ALL_LOADS = 0.02
_TARGET = 0.995
_COLD = 0.0003
_SWAPS, _CLUSTERS = 0.25, 0.05
_CHECK_EVERY = 256


class Placing:
    """A placement that knows its loads, and what moves would make of them."""

    def __init__(self, problem: Problem, device_of: Sequence[int]) -> None:
        self.problem = problem
        self.classes = problem.class_of_devices()
        self.device_of = list(device_of)
        self.time_s: list[list[float]] = problem.time_s.tolist()
        self.cost_s: list[list[float]] = problem.cost_s.tolist()
        self.memory: list[float] = problem.memory_bytes.tolist()
        self.limits = [float(problem.limits[index]) for index in self.classes]
        self.sizes = [len(pins) for pins in problem.pins]
        self.values_of: list[list[int]] = [[] for _ in range(problem.num_groups)]
        for value, pins in enumerate(problem.pins):
            for pin in pins:
                self.values_of[pin].append(value)
        self.loads: list[float] = []
        self.used: list[float] = []
        self.counts: list[list[int]] = []
        self.reset(device_of)

    def reset(self, device_of: Sequence[int]) -> None:
        """Become another placement."""
        num_devices = len(self.classes)
        self.device_of[:] = device_of
        self.loads, self.used = [0.0] * num_devices, [0.0] * num_devices
        self.counts = [[0] * num_devices for _ in self.sizes]
        for group, device in enumerate(device_of):
            self.loads[device] += self.time_s[group][self.classes[device]]
            self.used[device] += self.memory[group]
        for value, pins in enumerate(self.problem.pins):
            for pin in pins:
                self.counts[value][device_of[pin]] += 1
            for device, count in enumerate(self.counts[value]):
                if 0 < count < self.sizes[value]:
                    self.loads[device] += self.cost_s[value][self.classes[device]]

    def after(self, group: int, target: int) -> tuple[float, float]:
        """The loads of the device that a group leaves and of the one it goes to."""
        source = self.device_of[group]
        a, b = self.classes[source], self.classes[target]
        left = self.loads[source] - self.time_s[group][a]
        got = self.loads[target] + self.time_s[group][b]
        for value in self.values_of[group]:
            counts, size, cost = self.counts[value], self.sizes[value], self.cost_s[value]
            here, there = counts[source], counts[target]
            if here == size:
                left += cost[a]
                got += cost[b]
            else:
                if here == 1:
                    left -= cost[a]
                if there == 0:
                    got += cost[b]
                elif there == size - 1:
                    got -= cost[b]
        return left, got

    def move(self, group: int, target: int, left: float, got: float) -> None:
        """Move a group, given what `after` said."""
        source = self.device_of[group]
        self.loads[source], self.loads[target] = left, got
        self.used[source] -= self.memory[group]
        self.used[target] += self.memory[group]
        for value in self.values_of[group]:
            counts = self.counts[value]
            counts[source] -= 1
            counts[target] += 1
        self.device_of[group] = target


def anneal(
    problem: Problem, start: Sequence[int], *, num_moves: int, seed: int, deadline: float = math.inf, hot: float = 0.01
) -> tuple[float, list[int]]:
    """The best placement found from `start`, which must be feasible, and its max-load.

    Args:
        problem: What to place.
        start: [group] device.
        num_moves: Proposals.
        seed: Of the random numbers.
        deadline: By `time.monotonic()`: the search ends then at the latest.
        hot: The first temperature, as a share of the target.
    """
    placing = Placing(problem, start)
    proposals = _Proposals(placing, seed)
    random_ = proposals.rng.random
    best_value, best = max(placing.loads), list(start)
    target = best_value * _TARGET
    energy = _energy(placing.loads, target)
    temperature = hot * target
    cooling = (_COLD / hot) ** (_CHECK_EVERY / num_moves)
    for number in range(num_moves):
        if number % _CHECK_EVERY == 0:
            temperature *= cooling
            if time.monotonic() > deadline:
                break
        undo = proposals.move()
        if not undo:
            continue
        found = _energy(placing.loads, target)
        if found > energy and random_() >= math.exp((energy - found) / temperature):
            for group, device, left, got in reversed(undo):
                placing.move(group, device, left, got)
            continue
        energy = found
        value = max(placing.loads)
        if value < best_value * (1 - 1e-9):
            best_value, best = value, list(placing.device_of)
            target = best_value * _TARGET
            energy = _energy(placing.loads, target)
    return problem.max_load(best), best


class _Proposals:
    """Makes random moves that keep all memory limits; each returns what undoes it, nothing if there was no move."""

    def __init__(self, placing: Placing, seed: int) -> None:
        self.placing = placing
        self.rng = random.Random(seed)
        pins = placing.problem.pins
        self.pins_of = [[pin for value in values for pin in pins[value]] for values in placing.values_of]
        self.num_groups, self.num_devices = placing.problem.num_groups, len(placing.classes)

    def move(self) -> list[tuple[int, int, float, float]]:
        random_ = self.rng.random
        group = int(random_() * self.num_groups)
        near = self.pins_of[group]
        device_of = self.placing.device_of
        if near and random_() < 0.9:
            to = device_of[near[int(random_() * len(near))]]
        else:
            to = int(random_() * self.num_devices)
        kind = random_()
        if kind < _CLUSTERS:
            if to == device_of[group]:
                to = int(random_() * self.num_devices)
            return self._all(self._cluster(group), to)
        source = device_of[group]
        if to == source:
            return []
        if kind < _CLUSTERS + _SWAPS:
            other = int(random_() * self.num_groups)
            if device_of[other] == to:
                return self._all([group], to, other, source)
            return []
        return self._all([group], to)

    def _cluster(self, group: int) -> list[int]:
        """Some groups that hang together."""
        size = 2 + int(self.rng.random() ** 2 * min(self.num_groups / 3, 40))
        cluster, seen = [group], {group}
        for each in cluster:  # grows
            for pin in self.pins_of[each]:
                if pin not in seen and len(cluster) < size:
                    seen.add(pin)
                    cluster.append(pin)
        return cluster

    def _all(self, groups: list[int], to: int, other: int = -1, back: int = -1) -> list[tuple[int, int, float, float]]:
        placing = self.placing
        undo: list[tuple[int, int, float, float]] = []
        for group, device in (*((group, to) for group in groups), *(((other, back),) if other >= 0 else ())):
            source = placing.device_of[group]
            if source == device:
                continue
            if not math.isfinite(placing.time_s[group][placing.classes[device]]):
                continue
            left, got = placing.after(group, device)
            undo.append((group, source, placing.loads[device], placing.loads[source]))
            placing.move(group, device, left, got)
        if any(used > limit for used, limit in zip(placing.used, placing.limits, strict=True)):
            for group, device, left, got in reversed(undo):
                placing.move(group, device, left, got)
            return []
        return undo


def _energy(loads: Sequence[float], target: float) -> float:
    energy = 0.0
    for load in loads:
        energy += _ALL_LOADS * load
        if load > target:
            energy += load - target
    return energy
