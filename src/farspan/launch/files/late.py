"""Files kept apart from `distribute` on, where a launcher that is not ours has started the ranks."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Sequence

from farspan.launch.files.choice import install, is_installed, keeps_apart
from farspan.launch.files.layers import exists, remove_all

__all__ = ["install_late"]


def install_late(rank: int, gather: Callable[[bytes], Sequence[bytes]]) -> Callable[[], None]:
    """Keep the files of ranks apart, if that is wanted and not done yet; every rank calls it.

    Args:
        rank: Of this process.
        gather: Gives what all ranks pass, by rank.

    Returns:
        What to call when all ranks have ended: it removes the folder.
    """
    if not keeps_apart() or is_installed():
        return lambda: None
    folder = os.environ.get("FARSPAN_RUN_FOLDER", "")
    if os.path.isdir(folder):  # farspan run has made it, and removes it
        install(folder, rank)
        return lambda: None
    token = secrets.token_hex(8)
    if rank == 0:
        folder = tempfile.mkdtemp(prefix="farspan-run-")
        with open(f"{folder}/{token}", "w"):
            pass
    said = gather(f"{folder}/{token}".encode() if rank == 0 else b"")[0].decode()
    sees_first = exists(said)
    if rank:
        folder = os.path.dirname(said) if sees_first else tempfile.mkdtemp(prefix="farspan-run-")
    install(folder, rank, sees_first=sees_first)
    is_mine = rank == 0 or not sees_first
    return lambda: remove_all(folder if is_mine else f"{folder}/rank{rank}")
