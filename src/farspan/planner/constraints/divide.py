"""Devices that hints tell apart: a pinned rank is a class of its own, and so are those of a class with another memory.

"gpu"  4 devices                      "gpu" 0, 3    "gpu, rank:1" 1    "gpu, rank:2" 2
       pins to rank:1, rank:2   ->
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from farspan.cluster import Cluster, DeviceClass
from farspan.plan import Place
from farspan.plan.hints import Hints

__all__ = ["divide"]


def divide(cluster: Cluster, hints: Hints, pinned: Mapping[int, Place]) -> Cluster:
    """Returns the cluster in which devices of one class are alike for the hints too.

    Args:
        cluster: What there is. Its devices, host by host, are the ranks that hints speak of.
        hints: Whose `max_memory` counts.
        pinned: The ranks that something is pinned to, each with its place.
    """
    return Cluster(classes=tuple(part for each in cluster.classes for part in _parts(cluster, each, hints, pinned)))


def _parts(cluster: Cluster, whole: DeviceClass, hints: Hints, pinned: Mapping[int, Place]) -> list[DeviceClass]:
    alike: dict[tuple[int | None, float], list[int]] = {}
    numbers = [number for number, _ in cluster.devices(whole)]
    for index, number in enumerate(numbers):
        limit = hints.memory_of(number)
        memory = whole.memory_bytes if limit is None else min(limit, whole.memory_bytes)
        alike.setdefault((number if number in pinned else None, memory), []).append(index)
    parts: list[DeviceClass] = []
    for (rank, memory), indices in alike.items():
        same = [each for each in parts if each.name == whole.name]
        name = whole.name if rank is None and not same else f"{whole.name}, rank:{numbers[indices[0]]}"
        parts.append(
            replace(
                whole,
                name=name,
                memory_bytes=memory,
                part_of=whole.name,
                indices=tuple(indices),
                device="" if rank is None else pinned[rank].device or "",
            )
        )
    return parts
