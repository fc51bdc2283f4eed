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
pays_transfers = false           # left out: true
flops = "312 TFLOP/s"            # left out: by the kind, where it is known; for `farspan plan train.py` only
memory_bandwidth = "2 TB/s"      # of the device's own memory; as above
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from farspan.cluster.cluster import Cluster, DeviceClass
from farspan.documents import check_keys, read_text
from farspan.errors import PlanError
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
    "pays_transfers",
    "flops",
    "memory_bandwidth",
)
_FLOPS = {"": 1.0} | {f"{prefix}flop": 1000.0 ** (power + 1) for power, prefix in enumerate("kmgtp")}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster from a TOML file.

    Raises:
        PlanError: There is no such file, it is no TOML, or it does not describe a cluster.
    """
    return parse_cluster(read_text(path, hint="--cluster cluster.toml"), source=str(path))


def parse_cluster(text: str, *, source: str = "cluster.toml") -> Cluster:
    """The cluster that a TOML text describes.

    >>> parse_cluster('[[hosts]]\\nkind = "A100"\\ndevices = 8\\nmemory = "80 GiB"').num_devices
    8
    """
    try:
        document: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{source} is not TOML.", why=f"{error}.", hint='[[hosts]]\nkind = "A100"') from None
    check_keys(document, ("links", "hosts"), source)
    links = _table(document.get("links", {}), f"{source}: links")
    check_keys(links, _LINK_KEYS, f"{source}: links")
    hosts: Any = document.get("hosts")
    if not isinstance(hosts, list) or not hosts:
        raise PlanError(
            f"{source} names no hosts.", why="a cluster has at least one host.", hint='[[hosts]]\nkind = "A100"'
        )
    entries = [_table(entry, f"{source}: hosts") for entry in cast("list[Any]", hosts)]
    classes = tuple(
        _device_class({**links, **entry}, f"{source}: hosts[{index}]") for index, entry in enumerate(entries)
    )
    names = [each.name for each in classes]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(
                f'{source}: two tables of hosts are called "{name}".',
                why="the name of hosts, by default their kind, tells them from others.",
                hint=f'name = "{name}-2"',
            )
    return Cluster(classes=classes)


def _device_class(entry: Mapping[str, Any], where: str) -> DeviceClass:
    check_keys(entry, _HOST_KEYS, where)
    kind = entry.get("kind")
    name = entry.get("name", kind)
    for key, value in (("kind", kind), ("name", name)):
        if not isinstance(value, str) or not value:
            raise PlanError(f"{where}: {key} is {value!r}.", why=f"the {key} is a word.", hint=f'{key} = "A100"')
    pays = entry.get("pays_transfers", True)
    if not isinstance(pays, bool):
        raise PlanError(f"{where}: pays_transfers is {pays!r}.", why="it is true or false.", hint="true")
    speed = entry.get("speed", 1.0)
    if isinstance(speed, bool) or not isinstance(speed, (int, float)) or not 0 < speed < math.inf:
        raise PlanError(f"{where}: speed is {speed!r}.", why="it is a number above 0.", hint="speed = 1.0")
    return DeviceClass(
        name=cast(str, name),
        kind=cast(str, kind),
        num_hosts=_count(entry, "count", where),
        devices_per_host=_count(entry, "devices", where),
        memory_bytes=_amount(entry, "memory", BYTES, math.inf, "80 GiB", where),
        speed=float(speed),
        within_bytes_per_s=_amount(entry, "within", BYTES, math.inf, "300 GB/s", where),
        between_bytes_per_s=_amount(entry, "between", BYTES, math.inf, "25 GB/s", where),
        latency_s=_amount(entry, "latency", _SECONDS, 0.0, "5 us", where),
        pays_transfers=pays,
        flops_per_s=_amount(entry, "flops", _FLOPS, 0.0, "312 TFLOP/s", where),
        memory_bytes_per_s=_amount(entry, "memory_bandwidth", BYTES, 0.0, "2 TB/s", where),
    )


def _count(entry: Mapping[str, Any], key: str, where: str) -> int:
    value = entry.get(key, 1)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{where}: {key} is {value!r}.", why="it is a whole number from 1.", hint=f"{key} = 8")
    return value


def _amount(
    entry: Mapping[str, Any], key: str, units: Mapping[str, float], default: float, example: str, where: str
) -> float:
    """A number of bytes (per second) or seconds, given as a number or as text with a unit."""
    if key not in entry:
        return default
    given = entry[key]
    value = parse_amount(given, units)
    if value is None or not (value > 0 or (value == 0 and key == "latency")):
        raise PlanError(
            f"{where}: {key} is {given!r}.",
            why="it is a positive number with one of the units " + ", ".join(unit for unit in units if unit) + ".",
            hint=f'{key} = "{example}"',
        )
    return value


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"{where} is {value!r}.", why="it is a table.", hint='[[hosts]]\nkind = "A100"')
    return cast("dict[str, Any]", value)
