"""What the system says of processes: at which ports they listen, and how much of their memory is resident."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["listening_ports", "rank_processes", "resident_mib"]

_LISTENS = "0A"


def listening_ports(pids: Iterable[int]) -> list[int]:
    """The TCP ports at which these processes listen."""
    sockets: set[str] = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(entry)
            except OSError:
                continue
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
    ports: set[int] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if os.path.exists(table) else []:
            fields = line.split()
            if fields[3] == _LISTENS and fields[9] in sockets:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


def rank_processes(mark: str, variable: str) -> dict[int, int]:
    """The processes that run the training program with `mark` in their environment, by rank."""
    found: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if f"HOSTILE_MARK={mark}".encode() not in variables or b"train.py" not in words or b"farspan\0run" in words:
            continue
        for text in variables:
            name, _, value = text.decode(errors="replace").partition("=")
            if name == variable:
                found[int(value)] = int(folder.name)
    return found


def resident_mib(pid: int) -> float:
    """The memory of a process that is resident; 0 where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return 0.0
