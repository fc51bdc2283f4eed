"""Hosts made of network namespaces: each has one wire of limited rate to a switch.

namespace 0          switch (a bridge)       namespace 1
eth0 --- tbf --------- veth   veth -------- tbf --- eth0
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Hosts", "hosts", "why_not"]

_SWITCH = "fsslow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Namespaces by number, and where each is reached."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]

    def command(self, number: int) -> list[str]:
        """What to put before a command that is to run on that host."""
        return ["ip", "netns", "exec", self.names[number]]


def why_not() -> str:
    """Why there can be no such hosts here; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"there is no {' and no '.join(missing)} (iproute2) here"
    probe = f"{_SWITCH}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces are not allowed: {made.stderr.strip()}"
    _run("ip", "netns", "delete", probe)
    return ""


@contextlib.contextmanager
def hosts(number: int, *, bytes_per_s: float) -> Iterator[Hosts]:
    """`number` hosts whose wires carry so much out of each of them; gone afterwards."""
    names = tuple(f"{_SWITCH}-{index}" for index in range(number))
    addresses = tuple(f"10.77.0.{index + 1}" for index in range(number))
    _remove(names)
    try:
        _run("ip", "link", "add", _SWITCH, "type", "bridge")
        _run("ip", "link", "set", _SWITCH, "up")
        for index, (name, address) in enumerate(zip(names, addresses, strict=True)):
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", f"{_SWITCH}{index}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", f"{_SWITCH}{index}", "master", _SWITCH, "up")
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            burst = max(65536, int(bytes_per_s / 500))  # what goes in two milliseconds
            rate = f"{int(bytes_per_s * 8)}bit"
            limit = ("root", "tbf", "rate", rate, "burst", str(burst), "latency", "50ms")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", *limit)
        yield Hosts(names=names, addresses=addresses)
    finally:
        _remove(names)


def _remove(names: tuple[str, ...]) -> None:
    """What is there of an earlier run too. With a namespace alone its wire would go some time later."""
    wires = [f"{_SWITCH}{index}" for index in range(len(names))]
    for link in (*wires, _SWITCH):
        subprocess.run(["ip", "link", "delete", link], capture_output=True, check=False)
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
