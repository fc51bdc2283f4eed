"""The ranks of a program as a cluster: those alike in device, memory and speed are a class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farspan.cluster import Cluster, DeviceClass
from farspan.profile.machine import within_host

__all__ = ["RankDevice", "cluster_of_ranks"]

_BETWEEN_HOSTS_BYTES_PER_S = 1.25e9


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDevice:
    """What one rank computes on.

    Attributes:
        host: Name of its machine.
        kind: "cpu", "NVIDIA H200".
        memory_bytes: That it may use.
        speed: Compared with the device that costs are in seconds of.
    """

    host: str
    kind: str
    memory_bytes: float
    speed: float


def cluster_of_ranks(devices: Sequence[RankDevice]) -> tuple[Cluster, list[int]]:
    """The cluster, and which rank is its first device, its second, .. (class by class, host by host).

    Links between hosts are taken to carry 10 Gbit/s.

    Args:
        devices: By rank.

    Example:
        >>> ranks_on = [("a", 1.0), ("b", 1.0), ("a", 1.0), ("b", 1.0), ("c", 0.5)]
        >>> devices = [RankDevice(host=host, kind="cpu", memory_bytes=8e9, speed=speed) for host, speed in ranks_on]
        >>> cluster, ranks = cluster_of_ranks(devices)
        >>> [(each.num_hosts, each.devices_per_host, each.speed) for each in cluster.classes], ranks
        ([(2, 2, 1.0), (1, 1, 0.5)], [0, 2, 1, 3, 4])
    """
    alike: dict[tuple[str, float, float], dict[str, list[int]]] = {}
    for rank, each in enumerate(devices):
        hosts = alike.setdefault((each.kind, each.memory_bytes, each.speed), {})
        hosts.setdefault(each.host, []).append(rank)
    groups: dict[tuple[str, float, float, int], list[list[int]]] = {}
    for (kind, memory_bytes, speed), hosts in alike.items():
        for ranks in hosts.values():
            groups.setdefault((kind, memory_bytes, speed, len(ranks)), []).append(ranks)
    classes: list[DeviceClass] = []
    order: list[int] = []
    for number, ((kind, memory_bytes, speed, per_host), members) in enumerate(groups.items()):
        bytes_per_s, latency_s = within_host(kind)
        classes.append(
            DeviceClass(
                name=f"{kind} {number}",
                kind=kind,
                num_hosts=len(members),
                devices_per_host=per_host,
                memory_bytes=memory_bytes,
                speed=speed,
                within_bytes_per_s=bytes_per_s,
                between_bytes_per_s=_BETWEEN_HOSTS_BYTES_PER_S,
                latency_s=latency_s,
            )
        )
        order += [rank for ranks in members for rank in ranks]
    return Cluster(classes=tuple(classes)), order
