"""Decides which ranks keep their files apart, and where: set up once in a process, by its start or by `distribute`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from farspan import settings

__all__ = ["become_first", "catch_up", "install", "install_late", "keeps_apart"]

_CHOICES = {
    "first": "the files of rank 0 are the script's, those of the others are their own",
    "all": "all ranks write where the script says",
}
_installed: list[Callable[[int], None]] = []
_successors: list[Callable[[int], None]] = []
_num_barriers = 0


def keeps_apart(choice: str | None = None) -> bool:
    """Returns whether the script has rank 0's files only. It has, unless `choice`, or else FARSPAN_FILES, is "all".

    Raises:
        LaunchError: It says something else.
    """
    given = {f"{settings.PREFIX}FILES": choice} if choice else None
    found = settings.choice("FILES", _CHOICES, default="first", given=given)
    return found == "first" and os.name == "posix"


ELSEWHERE = "first-is-elsewhere"
"""A note of the launcher in the folder of the run: rank 0's folder is on another host."""


def install(folder: str, rank: int, *, sees_first: bool = True) -> None:
    """Let rank 0 keep what it changes in `folder`, or another rank write into a folder of its own there.

    Args:
        folder: Of the run; on one host all ranks have the same.
        rank: Of this process.
        sees_first: Whether rank 0's is the same folder.
    """
    if _installed:
        return
    from farspan.launch.sweep import use

    use(folder)
    sees_first = sees_first and not os.path.exists(f"{folder}/{ELSEWHERE}")
    if rank == 0:
        from farspan.launch.files.patches import install_journal

        _installed.append(install_journal(os.path.realpath(folder)))
    else:
        from farspan.launch.files.view_functions import install_view

        after_barrier, become_first = install_view(os.path.realpath(folder), rank, sees_first=sees_first)
        _installed.append(after_barrier)
        _successors.append(become_first)


def catch_up() -> None:
    """Makes what rank 0 has written visible to all. Every rank calls it, after a barrier."""
    global _num_barriers
    _num_barriers += 1
    for each in _installed:
        each(_num_barriers)


def become_first() -> None:
    """Lets the script's files be this rank's from here on: rank 0 is lost. All ranks then call `catch_up`, after a
    barrier.

    Raises:
        OSError: What this rank has written for itself cannot be put in its place.
    """
    while _successors:
        _successors.pop()(_num_barriers)


def install_late(rank: int, gather: Callable[[bytes], Sequence[bytes]]) -> Callable[[], None]:
    """Keep the files of ranks apart from here on, if that is wanted and not done yet; every rank calls it.

    For launchers that are not ours, under which a Python starts without us.

    Args:
        rank: Of this process.
        gather: Gives what all ranks pass, by rank.

    Returns:
        What to call when all ranks have ended: it removes the folder.
    """
    if not keeps_apart() or _installed:
        return lambda: None
    folder = os.environ.get("FARSPAN_RUN_FOLDER", "")
    if os.path.isdir(folder):  # farspan run has made it, and removes it
        install(folder, rank)
        return lambda: None
    import secrets
    import tempfile

    from farspan.launch.files.layers import exists, remove_all
    from farspan.launch.sweep import Sweeper

    token = secrets.token_hex(8)
    sweeper: Sweeper | None = None
    if rank == 0:
        folder = tempfile.mkdtemp(prefix="farspan-run-")
        sweeper = Sweeper(folder)  # other launchers than ours end a rank by SIGTERM, which leaves no time
        with open(f"{folder}/{token}", "w"):
            pass
    said = gather(f"{folder}/{token}".encode() if rank == 0 else b"")[0].decode()
    sees_first = exists(said)
    if rank and sees_first:
        folder = os.path.dirname(said)
    elif rank:
        folder = tempfile.mkdtemp(prefix="farspan-run-")
        sweeper = Sweeper(folder)
    install(folder, rank, sees_first=sees_first)

    def remove() -> None:
        if sweeper is not None:
            remove_all(folder)
            sweeper.close()

    return remove
