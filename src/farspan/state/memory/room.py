"""How much fits into memory, and the error where a save does not."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import psutil

from farspan.errors import CheckpointError
from farspan.state.format.disk import free_bytes
from farspan.units import format_bytes

__all__ = ["check_room", "room_in"]

_CGROUP = Path("/sys/fs/cgroup")


def room_in(folder: str) -> int:
    """Returns how many bytes fit into a folder in memory that is there."""
    return max(0, min(free_bytes(folder), psutil.virtual_memory().available, _left_in_container()))


def check_room(ranks: Sequence[tuple[int, int, int]]) -> None:
    """Raise unless a save fits into memory, beside the one before it.

    Args:
        ranks: For each, which host it is on, how many bytes it writes, and how many fit there.

    Raises:
        CheckpointError: It does not fit.
    """
    hosts = sorted({host for host, _, _ in ranks})
    written = {number: sum(size for host, size, _ in ranks if host == number) for number in hosts}
    for number, before in zip(hosts, [hosts[-1], *hosts[:-1]], strict=True):
        room = next(found for host, _, found in ranks if host == number)
        needed = written[number] + (written[before] if before != number else 0)
        if needed > room:
            where = f" on host {number}" if len(hosts) > 1 else ""
            what = f"{format_bytes(needed)}, with the copy of another host's," if where else format_bytes(needed)
            raise CheckpointError(
                f"what is saved does not fit into the memory that is free{where}.",
                why=f"it is {what} and {format_bytes(room)} are free (in /dev/shm, and of all memory); "
                "the save before this one stays until this one is whole.",
                hint="memory=False, onto the disk\nmount -o remount,size=... /dev/shm, if that is less than the memory",
            )


def _left_in_container() -> int:
    """Returns what the control group of a container may still use, when it gives back what it can."""
    with contextlib.suppress(OSError, ValueError, KeyError):  # there is none, or it says "max"
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        found = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return limit - used + int(found["inactive_file"])
    return psutil.virtual_memory().total
