"""The best free placement of a small problem, by branch and bound over the groups, heaviest first.

A branch is cut where a device's load so far, or all work so far and to come spread over all devices in fractions, is
no better than the best placement known. Devices of a class that are still empty are alike: one of them is tried.
"""

from __future__ import annotations

import numpy as np
from benchmarks.planner_placement.placement.problem import Problem

from farspan.planner.cost_model.bounds import best_weights

__all__ = ["exact_placement"]


def exact_placement(problem: Problem, upper: float, *, max_steps: int = 100_000) -> tuple[list[int] | None, bool]:
    """The best placement of max-load below `upper`, None if there is none; and whether the search came to its end."""
    search = _Search(problem, upper, max_steps)
    is_done = search.place(0)
    return search.best, is_done


class _Search:
    def __init__(self, problem: Problem, upper: float, max_steps: int) -> None:
        self.problem = problem
        self.upper = upper
        self.steps_left = max_steps
        self.best: list[int] | None = None
        self.classes = problem.class_of_devices()
        weights, shares = best_weights(problem.time_s, problem.counts)
        self.weights: list[float] = weights.tolist()
        lightest: list[float] = np.where(np.isfinite(problem.time_s), problem.time_s, -1.0).max(axis=1).tolist()
        self.order = sorted(range(problem.num_groups), key=lambda group: -lightest[group])
        rest = [0.0]
        for group in reversed(self.order):
            rest.append(rest[-1] + float(shares[group]))
        self.rest = rest[::-1]
        self.time_s: list[list[float]] = problem.time_s.tolist()
        self.cost_s: list[list[float]] = problem.cost_s.tolist()
        self.memory: list[float] = problem.memory_bytes.tolist()
        self.limits: list[float] = problem.limits.tolist()
        self.values_of: list[list[int]] = [[] for _ in range(problem.num_groups)]
        for value, pins in enumerate(problem.pins):
            for pin in pins:
                self.values_of[pin].append(value)
        self.devices_of: list[list[int]] = [[] for _ in problem.pins]  # of the pins placed, each once a pin
        self.device_of = [-1] * problem.num_groups
        self.loads = [0.0] * len(self.classes)
        self.used = [0.0] * len(self.classes)
        self.members = [0] * len(self.classes)

    def place(self, depth: int) -> bool:
        """Try all places of the groups from `depth` on; False if the steps ran out."""
        if depth == len(self.order):
            self.upper, self.best = max(self.loads), list(self.device_of)
            return True
        group = self.order[depth]
        tried_empty: set[int] = set()
        for device, kind in enumerate(self.classes):
            if not self.members[device]:
                if kind in tried_empty:
                    continue
                tried_empty.add(kind)
            if self.used[device] + self.memory[group] > self.limits[kind]:
                continue
            self.steps_left -= 1
            if self.steps_left < 0:
                return False
            loads = list(self.loads)
            self._add(group, device)
            spread = sum(load * self.weights[self.classes[at]] for at, load in enumerate(self.loads))
            good = max(self.loads) < self.upper and spread + self.rest[depth + 1] < self.upper
            is_done = self.place(depth + 1) if good else True
            self._remove(group, device)
            self.loads = loads
            if not is_done:
                return False
        return True

    def _add(self, group: int, device: int) -> None:
        self.loads[device] += self.time_s[group][self.classes[device]]
        for value in self.values_of[group]:
            devices = self.devices_of[value]
            if devices and device not in devices:
                self.loads[device] += self.cost_s[value][self.classes[device]]
                if len(set(devices)) == 1:
                    self.loads[devices[0]] += self.cost_s[value][self.classes[devices[0]]]
            devices.append(device)
        self.used[device] += self.memory[group]
        self.members[device] += 1
        self.device_of[group] = device

    def _remove(self, group: int, device: int) -> None:
        for value in self.values_of[group]:
            self.devices_of[value].pop()
        self.used[device] -= self.memory[group]
        self.members[device] -= 1
        self.device_of[group] = -1
