"""Where checkpoints lie in memory, and which is the newest of those in memory and those on the disk.

    FARSPAN_MEMORY/                    made by `farspan run`, in /dev/shm: it is there until the run is over
      3f0c9a.../                       of one folder of checkpoints, by a digest of its path
        step-30/                       as on the disk (`state.format`)

Saves into a folder and into its memory are counted together (`Manifest.serial`), so that there is one order of both.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable

from farspan import settings
from farspan.state.format import candidates, newest, serial_of
from farspan.state.memory.hosts import hosts_of_memory

__all__ = [
    "all_candidates",
    "memory_of",
    "fetches",
    "for_other_hosts",
    "from_other_host",
    "newest_of_all",
    "top_of_memory",
]

_IN_MEMORY = "memory:"
"""Stands for the host's own folder in what ranks tell each other; all other paths are absolute."""


def memory_of(root: str) -> str:
    """Returns the folder in memory that belongs to a folder of checkpoints; "" where no memory outlives this process.

    Args:
        root: The absolute path of the folder of checkpoints.
    """
    top = top_of_memory()
    return f"{top}/{hashlib.blake2b(root.encode(), digest_size=16).hexdigest()}" if top else ""


def top_of_memory() -> str:
    """Returns the folder in memory that outlives this process; "" where there is none."""
    return settings.text("MEMORY")


def for_other_hosts(path: str) -> str:
    """Returns a path as ranks of other hosts are given it: each host has a folder of its own in memory."""
    top = top_of_memory()
    return f"{_IN_MEMORY}{path.removeprefix(top)}" if top and path.startswith(f"{top}/") else path


def from_other_host(text: str) -> str:
    """Returns a path here from what `for_other_hosts` gave on another host."""
    return top_of_memory() + text.removeprefix(_IN_MEMORY) if text.startswith(_IN_MEMORY) else text


def newest_of_all(root: str) -> str | None:
    """Returns the checkpoint to load, in memory or on the disk; None if there is none.

    Args:
        root: The absolute path of the folder of checkpoints.
    """
    memory = memory_of(root)
    found = [path for path in (newest(root), _newest_in(memory)) if path is not None]
    return max(found, key=_order, default=None)


def all_candidates(root: str) -> list[str]:
    """Returns all checkpoints, in memory and on the disk, the one to load first; damaged ones come last."""
    memory = memory_of(root)
    if not memory:
        return candidates(root)
    hosts = hosts_of_memory()
    whole = hosts.newest(memory) if hosts is not None else None
    kept = candidates(memory) if hosts is None else [whole] if whole is not None else []
    return sorted([*kept, *candidates(root)], key=serial_of, reverse=True)


def fetches(folder: str) -> Callable[[str, str], None] | None:
    """Returns what fetches a file of a checkpoint in the memory of several hosts; its manifest is here then.

    Args:
        folder: The checkpoint's.
    """
    hosts = hosts_of_memory()
    if hosts is None or not folder.startswith(f"{hosts.top}/"):
        return None
    hosts.newest(os.path.dirname(folder))
    return hosts.bring


def _newest_in(memory: str) -> str | None:
    hosts = hosts_of_memory()
    if not memory or hosts is None:
        return newest(memory) if memory else None
    return hosts.newest(memory)


def _order(path: str) -> float:
    """Whatever is damaged is not passed over in silence."""
    serial = serial_of(path)
    return serial if serial >= 0 else math.inf
