"""Two hosts on one machine: network namespaces with a router between them, whose ways can be cut.

    host 0  10.77.1.2 -- 10.77.1.1  router  10.77.2.1 -- 10.77.2.2  host 1

Needs root and `ip` (Linux).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["ADDRESSES", "Hosts", "are_possible", "two_hosts"]

ADDRESSES = ("10.77.1.2", "10.77.2.2")
_numbers = itertools.count()


def are_possible() -> bool:
    """Whether this process may make network namespaces."""
    if sys.platform != "linux" or os.getuid() != 0 or shutil.which("ip") is None:
        return False
    name = _fresh_name()
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made


class Hosts:
    """Two hosts that reach each other until they are cut apart."""

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self, host: int, script: Path, variables: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
        """A Python process on one of the hosts; it writes to `output`."""
        command = ["ip", "netns", "exec", f"{self.name}{host}", sys.executable, str(script)]
        with output.open("wb") as file:
            return subprocess.Popen(
                command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def cut(self, *to: int) -> None:
        """Drop what goes to these hosts."""
        for host in to:
            _ip("-n", f"{self.name}r", "route", "add", "blackhole", f"{ADDRESSES[host]}/32")

    def slow_down(self, rate: str) -> None:
        """Let no more than that through, in the words of `tc`."""
        for host in range(len(ADDRESSES)):
            way = ["dev", f"{self.name}r{host}", "root", "tbf", "rate", rate, "burst", "4kb", "latency", "500ms"]
            _run("tc", "-n", f"{self.name}r", "qdisc", "add", *way)

    def mend(self, *to: int) -> None:
        """Let it through again."""
        for host in to:
            _ip("-n", f"{self.name}r", "route", "del", "blackhole", f"{ADDRESSES[host]}/32")


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make them, and remove them at the end."""
    name = _fresh_name()
    spaces = [f"{name}0", f"{name}1", f"{name}r"]
    try:
        for space in spaces:
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        for host, address in enumerate(ADDRESSES):
            here, there = f"{name}h{host}", f"{name}r{host}"
            gateway = address.rpartition(".")[0] + ".1"
            pair = ["peer", "name", there, "netns", f"{name}r"]
            _ip("link", "add", here, "netns", f"{name}{host}", "type", "veth", *pair)
            for space, link, own in ((f"{name}{host}", here, address), (f"{name}r", there, gateway)):
                _ip("-n", space, "addr", "add", f"{own}/24", "dev", link)
                _ip("-n", space, "link", "set", link, "up")
            _ip("-n", f"{name}{host}", "route", "add", "default", "via", gateway)
        _ip("netns", "exec", f"{name}r", "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        yield Hosts(name)
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _fresh_name() -> str:
    return f"f{os.getpid() % 100_000}x{next(_numbers)}"


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
