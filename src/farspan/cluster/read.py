"""Reading cluster.toml:

[links]                          # the default for all hosts
within = "300 GB/s"              # between devices of one host
between = "25 GB/s"              # between hosts, for each device
latency = "5 us"

[[hosts]]                        # one table for hosts that are alike
name = "new"                     # optional: the kind
kind = "A100"
count = 4                        # hosts
devices = 8                      # on each
memory = "80 GiB"                # of each device; left out: no limit
speed = 1.0                      # left out: 1
within = "600 GB/s"              # as in [links], for these hosts
flops = "312 TFLOP/s"            # left out: by the kind, where it is known; for `farspan plan train.py` only
memory_bandwidth = "2 TB/s"      # of the device's own memory; as above
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from farspan.cluster.cluster import Cluster, DeviceClass
from farspan.documents import (
    MAX_AMOUNT,
    as_count,
    as_name,
    as_number,
    as_object,
    check_keys,
    parse_toml,
    read_text,
)
from farspan.errors import PlanError, quoted
from farspan.units import BYTES, parse_amount

__all__ = ["parse_cluster", "read_cluster"]

_LINK_KEYS = ("within", "between", "latency")
_HOST_KEYS = (
    "name",
    "kind",
    "count",
    "devices",
    "memory",
    "speed",
    *_LINK_KEYS,
    "flops",
    "memory_bandwidth",
)
_EXAMPLE = '[[hosts]]\nkind = "A100"'
_MOST_CLASSES = 256
_FLOPS = {"": 1.0} | {f"{prefix}flop": 1000.0 ** (power + 1) for power, prefix in enumerate("kmgtp")}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster from a TOML file.

    Raises:
        PlanError: There is no such file, it is no TOML, or it does not describe a cluster.
    """
    return parse_cluster(read_text(path, hint="--cluster cluster.toml"), source=str(path))


def parse_cluster(text: str, *, source: str = "cluster.toml") -> Cluster:
    """Returns the cluster that a TOML text describes.

    >>> parse_cluster('[[hosts]]\\nkind = "A100"\\ndevices = 8\\nmemory = "80 GiB"').num_devices
    8
    """
    document = as_object(parse_toml(text, source), source, known=("links", "hosts"))
    links = as_object(document.get("links", {}), f"{source}: links", known=_LINK_KEYS, hint=_EXAMPLE)
    links = {key: _link(links, key, f"{source}: links") for key in links}
    hosts = document.get("hosts")
    if not isinstance(hosts, list) or not hosts:
        raise PlanError(f"{source} names no hosts.", why="a cluster has at least one host.", hint=_EXAMPLE)
    entries = cast("list[Any]", hosts)
    if len(entries) > _MOST_CLASSES:
        why = f"at most {_MOST_CLASSES} are read."
        raise PlanError(f"{source} has too many tables of hosts.", why=why, hint="count = 4, for hosts that are alike")
    classes = tuple(
        _device_class(as_object(entry, f"{source}: hosts", hint=_EXAMPLE), links, f"{source}: hosts[{index}]")
        for index, entry in enumerate(entries)
    )
    names = [each.name for each in classes]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(
                f'{source}: two tables of hosts are called "{name}".',
                why="the name of hosts, by default their kind, tells them from others.",
                hint=f'name = "{name}-2"',
            )
    cluster = Cluster(classes=classes)
    as_count(cluster.num_devices, f"{source}: the number of all devices", least=1)
    return cluster


def _device_class(own: Mapping[str, Any], links: Mapping[str, Any], where: str) -> DeviceClass:
    check_keys(own, _HOST_KEYS, where)
    if "kind" not in own:
        raise PlanError(
            f"{where} has no kind.",
            why="a table of hosts says what devices each of them has.",
            hint='[[hosts]]\nkind = "A100"\ncount = 2  # hosts\ndevices = 8  # of each\nmemory = "80 GiB"',
        )
    entry = {**links, **own}
    kind = as_name(entry.get("kind"), f"{where}: kind")
    return DeviceClass(
        name=as_name(entry.get("name", kind), f"{where}: name"),
        kind=kind,
        num_hosts=as_count(entry.get("count", 1), f"{where}: count", least=1),
        devices_per_host=as_count(entry.get("devices", 1), f"{where}: devices", least=1),
        memory_bytes=_amount(entry, "memory", BYTES, math.inf, "80 GiB", where),
        speed=as_number(entry.get("speed", 1.0), f"{where}: speed", least=1e-6, most=1e6),
        within_bytes_per_s=_link(entry, "within", where),
        between_bytes_per_s=_link(entry, "between", where),
        latency_s=_link(entry, "latency", where),
        flops_per_s=_amount(entry, "flops", _FLOPS, 0.0, "312 TFLOP/s", where),
        memory_bytes_per_s=_amount(entry, "memory_bandwidth", BYTES, 0.0, "2 TB/s", where),
    )


def _link(entry: Mapping[str, Any], key: str, where: str) -> float:
    if key == "latency":
        return _amount(entry, key, _SECONDS, 0.0, "5 us", where)
    return _amount(entry, key, BYTES, math.inf, "25 GB/s", where)


def _amount(
    entry: Mapping[str, Any], key: str, units: Mapping[str, float], default: float, example: str, where: str
) -> float:
    """Returns a number of bytes (per second) or seconds, given as a number or as text with a unit."""
    if key not in entry:
        return default
    given = entry[key]
    value = parse_amount(given, units, is_rate=example.endswith("/s"))
    least = 0.0 if key == "latency" else 1.0
    if value is None or not least <= value <= MAX_AMOUNT:
        raise PlanError(
            f"{where}: {key} is {quoted(given)}.",
            why=f"it is a number from {least:g} to {MAX_AMOUNT:g}, with one of the units "
            + ", ".join(unit for unit in units if unit)
            + ".",
            hint=f'{key} = "{example}"',
        )
    return value
