"""A first placement where memory is scarce: groups one by one, the largest first, where they fit."""

from __future__ import annotations

import math
import random

from benchmarks.planner_placement.placement.problem import Problem

__all__ = ["pack"]

_TRIES = 200


def pack(problem: Problem, seed: int) -> list[int] | None:
    """A placement that breaks no limit, or None if none was found."""
    classes = problem.class_of_devices()
    rng = random.Random(seed)
    memory: list[float] = problem.memory_bytes.tolist()
    for number in range(_TRIES):
        noise = [1.0 + (0.3 * rng.random() if number else 0.0) for _ in memory]
        order = sorted(range(problem.num_groups), key=lambda group: -memory[group] * noise[group])
        used, loads = [0.0] * len(classes), [0.0] * len(classes)
        device_of = [-1] * problem.num_groups
        for group in order:
            fits = [
                device
                for device, kind in enumerate(classes)
                if used[device] + memory[group] <= problem.limits[kind] and math.isfinite(problem.time_s[group, kind])
            ]
            if not fits:
                break
            # By load at first; if that does not fit, where the least room is left.
            if number % 2 == 0:
                chosen = min(fits, key=lambda device: loads[device] + problem.time_s[group, classes[device]])
            else:
                chosen = min(fits, key=lambda device: problem.limits[classes[device]] - used[device])
            device_of[group] = chosen
            used[chosen] += memory[group]
            loads[chosen] += problem.time_s[group, classes[chosen]]
        else:
            return device_of
    return None
