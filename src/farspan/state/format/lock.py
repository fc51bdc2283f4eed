"""Lets one program at a time save into a folder of checkpoints.

A file `lock` is there while a save goes on, and says whose it is. The kernel holds the lock itself for the living
process, so what a crash leaves locks nothing. On network file systems it holds between hosts only where these pass it
on (NFS: unless mounted with `nolock` or `local_lock`); a file system without locks is used without.
"""

from __future__ import annotations

import contextlib
import os
import socket

from farspan.errors import CheckpointError
from farspan.state.format import disk

__all__ = ["Lock", "hold"]

_NAME = "lock"
_NUM_ATTEMPTS = 100
"""Each time another program has taken and released it between two of this one's operations."""


class Lock:
    """That of a folder, held by this process.

    Args:
        path: Of its file.
        file: Open and locked.
    """

    def __init__(self, path: str, file: int) -> None:
        self._path = path
        self._file = file

    def release(self) -> None:
        """Let others save into the folder."""
        with contextlib.suppress(OSError):  # what stays there locks nothing
            disk.unlink(self._path)  # while it is held: another one's must not go
        disk.unlock(self._file)


def hold(root: str) -> Lock | None:
    """Take the lock of a folder that is there; None on a file system that has none.

    Raises:
        CheckpointError: Another program has it.
        OSError: Its file cannot be made.
    """
    path = f"{root}/{_NAME}"
    for _ in range(_NUM_ATTEMPTS):
        file = disk.open_to_lock(path)
        is_locked = disk.lock(file)
        if is_locked is None:
            disk.close(file)
            return None
        if not is_locked:
            disk.close(file)
            break
        if disk.is_at(file, path):  # else who had it has removed it
            disk.rewrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
            return Lock(path, file)
        disk.unlock(file)
    raise CheckpointError(
        f"another program is saving into {root}.",
        why=f"{_owner(path)} has begun a checkpoint there, and each may remove what the other writes.",
        hint="a folder of its own for each program, or end the other one",
    )


def _owner(path: str) -> str:
    try:
        text = disk.read_small(path).decode(errors="replace")
    except OSError:
        text = ""
    return text[:100] if text.isprintable() and text else "it"
