"""A cluster: device classes, each of devices that are alike in every way that a plan can notice.

class a  4 hosts x 8 devices      class b  2 hosts x 4 devices
+--+--+..+--+                     +--+--+--+--+
|  within  |  --- between --- ... |  within   |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Cluster", "DeviceClass"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClass:
    """Devices that are alike: same kind, memory, speed and links.

    Attributes:
        name: Its own name, by which nodes of a graph may allow or forbid it.
        kind: What the devices are ("A100", "cpu"); times of a graph may be given by kind.
        num_hosts: Hosts that are alike.
        devices_per_host: Devices on each of them.
        memory_bytes: Of each device; infinite if it is not a limit.
        speed: How much faster than the device that the seconds of a graph are of (where these are not by kind).
        within_bytes_per_s: Bandwidth between devices of one host.
        between_bytes_per_s: Bandwidth between hosts, for each device.
        latency_s: What a transfer takes besides.
        flops_per_s: What it computes at most; 0 if only its kind says so, if anything.
        memory_bytes_per_s: How fast its own memory is; 0 as above.
        part_of: Of a part of a class the name of that class: hosts are those of the whole class.
        indices: Which of the devices of that class it has, counted host by host.
        device: What the device is called on its rank ("cuda:0"), where a plan is to say so.
    """

    name: str
    kind: str
    num_hosts: int = 1
    devices_per_host: int = 1
    memory_bytes: float = math.inf
    speed: float = 1.0
    within_bytes_per_s: float = math.inf
    between_bytes_per_s: float = math.inf
    latency_s: float = 0.0
    flops_per_s: float = 0.0
    memory_bytes_per_s: float = 0.0
    part_of: str = ""
    indices: tuple[int, ...] = ()
    device: str = ""

    @property
    def num_devices(self) -> int:
        return len(self.indices) if self.part_of else self.num_hosts * self.devices_per_host

    @property
    def whole(self) -> str:
        """The name of the class that it is, or is a part of."""
        return self.part_of or self.name

    @property
    def words(self) -> tuple[str, ...]:
        """Returns the names by which costs and restrictions may call it, the narrowest first."""
        return (self.name, self.whole, self.kind)

    def bandwidth(self, num_devices: int) -> float:
        """Returns bytes per second of the slowest link in a group of that many of these devices."""
        return self.within_bytes_per_s if num_devices <= self.devices_per_host else self.between_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The devices to plan for: the classes, and the number of devices in each."""

    classes: tuple[DeviceClass, ...]

    @property
    def num_devices(self) -> int:
        return sum(each.num_devices for each in self.classes)

    @property
    def num_hosts(self) -> int:
        return sum({each.whole: each.num_hosts for each in self.classes}.values())

    def devices(self, device_class: DeviceClass) -> list[tuple[int, int]]:
        """Returns for each device of that class its number in the cluster, counted host by host, and its host's number
        in the class."""
        first = 0
        for name, count in {each.whole: each.num_hosts * each.devices_per_host for each in self.classes}.items():
            if name == device_class.whole:
                break
            first += count
        indices = device_class.indices if device_class.part_of else range(device_class.num_devices)
        return [(first + index, index // device_class.devices_per_host) for index in indices]

    def link(self, device_class: DeviceClass, *, is_near: bool = False) -> float:
        """Returns bytes per second from a device of that class to any other: within its host where there is no other.

        Args:
            device_class: Of the device.
            is_near: To the nearest one: no pair of devices has a faster link.
        """
        within, between = device_class.within_bytes_per_s, device_class.between_bytes_per_s
        if self.num_hosts == 1:
            return within
        return max(within, between) if is_near and device_class.devices_per_host > 1 else between

    @property
    def has_near_links(self) -> bool:
        """Returns whether it matters to a transfer which two devices it is between."""
        return any(self.link(each, is_near=True) > self.link(each) for each in self.classes)
