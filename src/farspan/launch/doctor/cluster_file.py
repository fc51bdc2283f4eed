"""The hosts as a file for the planner: `farspan plan --cluster cluster.toml`.

A host's link is the fastest of those that it has: of two hosts the slower one is what holds a transfer up. Hosts that
have the same devices, and links within half as much again, are of one class, with the slowest link in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from farspan.cluster import within_host
from farspan.cluster.read import parse_cluster
from farspan.errors import LaunchError, printable
from farspan.launch.doctor.examine import Examination, Link
from farspan.launch.doctor.facts import Facts
from farspan.launch.hosts.host import Host

__all__ = ["format_cluster"]

_ALIKE = 1.5


@dataclass(slots=True, kw_only=True)
class _HostClass:
    """Hosts that are alike; bytes per second and seconds between them and others."""

    kind: str
    num_devices: int
    memory_gib: float
    first_bytes_per_s: float
    bytes_per_s: float
    latency_s: float
    names: list[str] = field(default_factory=list[str])


def format_cluster(found: Examination) -> str:
    """Returns the text of cluster.toml.

    Raises:
        FarspanError: Something that it needs could not be measured, or makes no sense.
    """
    missing = [host.name for host in found.hosts if host.name not in found.facts]
    missing += [f"{link.source} > {link.destination}" for link in found.links if link.error]
    if missing:
        raise LaunchError(
            "there is no file for the planner yet.",
            why=f"{missing[0]} could not be measured.",
            hint="mend what is wrong, or leave the host out of --hosts",
        )
    classes: list[_HostClass] = []
    for host in found.hosts:
        _add(classes, _class_of(host, found.facts[host.name], found.links))
    tables = [_table(each, is_only_one=len(classes) == 1, has_links=bool(found.links)) for each in classes]
    head = "# Written by farspan doctor. Bandwidth and latency between hosts: as measured, one connection over TCP."
    text = "\n".join([head, *tables])
    parse_cluster(text)
    return text


def _class_of(host: Host, facts: Facts, links: Sequence[Link]) -> _HostClass:
    if facts.devices:
        kind, count = facts.devices[0].name, len(facts.devices)
        memory = min(device.memory_bytes for device in facts.devices)
    else:
        kind, count = "cpu", host.num_processes
        memory = facts.memory_bytes // count
    own = [link for link in links if host.name in (link.source, link.destination)]
    bandwidth = max((_both_ways(link, own) for link in own), default=0.0)
    return _HostClass(
        kind=kind,
        num_devices=count,
        memory_gib=max(memory * 100 // 2**30, 1) / 100,
        first_bytes_per_s=bandwidth,
        bytes_per_s=bandwidth,
        latency_s=min((link.latency_s for link in own), default=0.0),
        names=[host.name],
    )


def _both_ways(link: Link, links: Sequence[Link]) -> float:
    """Returns the bandwidth of the slower way between two hosts."""
    ends = {link.source, link.destination}
    return min(each.bytes_per_s for each in links if {each.source, each.destination} == ends)


def _add(classes: list[_HostClass], own: _HostClass) -> None:
    for each in classes:
        is_same = (each.kind, each.num_devices, each.memory_gib) == (own.kind, own.num_devices, own.memory_gib)
        slower, faster = sorted((each.first_bytes_per_s, own.bytes_per_s))
        if is_same and faster <= _ALIKE * slower:
            each.names += own.names
            each.bytes_per_s = min(each.bytes_per_s, own.bytes_per_s)
            each.latency_s = max(each.latency_s, own.latency_s)
            return
    classes.append(own)


def _table(own: _HostClass, *, is_only_one: bool, has_links: bool) -> str:
    within_bytes_per_s, within_latency_s = within_host(own.kind)
    name = own.kind if is_only_one else own.names[0]
    lines = [f"[[hosts]]  # {', '.join(own.names)}", f"name = {_quoted(name)}", f"kind = {_quoted(own.kind)}"]
    lines += [f"count = {len(own.names)}", f"devices = {own.num_devices}", f'memory = "{own.memory_gib} GiB"']
    lines.append(f'within = "{within_bytes_per_s / 1e9:g} GB/s"  # not measured')
    if has_links:
        lines.append(f'between = "{own.bytes_per_s / 1e6:.4g} MB/s"')
    latency_s = own.latency_s if has_links else within_latency_s
    lines.append(f'latency = "{latency_s * 1e6:.3g} us"')
    if own.kind != "cpu":
        lines.append('# flops = "... TFLOP/s" and memory_bandwidth = "... TB/s", to plan where there is no such GPU')
    return "\n".join(["", *lines])


def _quoted(name: str) -> str:
    """Returns a text as TOML has it, which a host may have sent."""
    return json.dumps(printable(name), ensure_ascii=False)
