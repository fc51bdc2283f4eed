"""The ranks of a program as a cluster: those alike in device, memory and speed are a class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType

from farspan.cluster import Cluster, DeviceClass, within_host

__all__ = ["HostLink", "RankDevice", "cluster_of_ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """A host's link to other hosts.

    Attributes:
        bytes_per_s: Bandwidth.
        latency_s: What a message takes besides.
    """

    bytes_per_s: float = math.inf
    latency_s: float = 0.0

    def slower_of(self, other: HostLink) -> HostLink:
        """Returns a link that is no faster than either, in bandwidth and in latency."""
        return HostLink(
            bytes_per_s=min(self.bytes_per_s, other.bytes_per_s), latency_s=max(self.latency_s, other.latency_s)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDevice:
    """The device that one rank computes on.

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


def cluster_of_ranks(
    devices: Sequence[RankDevice], links: Mapping[str, HostLink] = MappingProxyType({})
) -> tuple[Cluster, list[int]]:
    """Returns the cluster, and which rank is its first device, its second, .. (class by class, host by host).

    Args:
        devices: By rank.
        links: By host; without one it has no limit. Hosts that are alike count as having the slowest one of theirs.

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
    groups: dict[tuple[str, float, float, int], dict[str, list[int]]] = {}
    for (kind, memory_bytes, speed), hosts in alike.items():
        for host, ranks in hosts.items():
            groups.setdefault((kind, memory_bytes, speed, len(ranks)), {})[host] = ranks
    classes: list[DeviceClass] = []
    order: list[int] = []
    for number, ((kind, memory_bytes, speed, per_host), members) in enumerate(groups.items()):
        bytes_per_s, latency_s = within_host(kind)
        link = reduce(HostLink.slower_of, (links[host] for host in members if host in links), HostLink())
        classes.append(
            DeviceClass(
                name=f"{kind} {number}",
                kind=kind,
                num_hosts=len(members),
                devices_per_host=per_host,
                memory_bytes=memory_bytes,
                speed=speed,
                within_bytes_per_s=bytes_per_s,
                between_bytes_per_s=link.bytes_per_s,
                latency_s=max(latency_s, link.latency_s),
            )
        )
        order += [rank for ranks in members.values() for rank in ranks]
    return Cluster(classes=tuple(classes)), order
