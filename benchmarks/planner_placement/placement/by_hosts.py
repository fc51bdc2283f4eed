"""The loads of a placement where a transfer takes less between two devices of one host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from benchmarks.planner_placement.placement.problem import Problem

from farspan.cluster import Cluster
from farspan.planner.cost_model.colocation import FloatArray

__all__ = ["ByPairs"]


class ByPairs:
    """Loads by the devices that each value is on.

    Args:
        far: The problem with the costs of transfers to any device.
        near: The same to the nearest one.
        cluster: Where.
    """

    def __init__(self, far: Problem, near: Problem, cluster: Cluster) -> None:
        self._far = far
        self._near_s: dict[tuple[int, ...], FloatArray] = dict(zip(near.pins, near.cost_s, strict=True))
        self._hosts = [
            (each.whole, host)
            for each, count in zip(cluster.classes, far.counts, strict=True)
            for _, host in cluster.devices(each)[:count]
        ]

    def loads(self, device_of: Sequence[int]) -> FloatArray:
        """The load of each device: a value on several hosts costs what goes to any device, another what stays near."""
        problem, classes = self._far, self._far.class_of_devices()
        loads = problem.loads(device_of)
        for pins, far_s in zip(problem.pins, problem.cost_s, strict=True):
            devices = {device_of[pin] for pin in pins}
            if len(devices) == 1 or len({self._hosts[device] for device in devices}) == len(devices):
                continue
            near_s = self._near_s.get(pins, np.zeros(len(far_s)))
            for device in devices:
                if all(self._hosts[other] == self._hosts[device] for other in devices):
                    loads[device] -= far_s[classes[device]] - near_s[classes[device]]
        return loads
