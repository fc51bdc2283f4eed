"""What a run leaves behind: processes with its mark, folders and shared memory of farspan's."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

__all__ = ["end_marked", "left_files", "marked", "wait_for_none"]


def marked(mark: str) -> dict[int, str]:
    """The processes that run and have `mark` in their environment or command line, with that command line."""
    found: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            words = (folder / "cmdline").read_bytes()
            if mark.encode() not in (folder / "environ").read_bytes() and mark.encode() not in words:
                continue
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # it has ended in the meantime
        if state not in "ZX":
            text = words.replace(b"\0", b" ").decode(errors="replace").strip()
            found[int(folder.name)] = f"{text[:120]} ({state})"
    return found


def wait_for_none(mark: str, within_s: float, *, but: set[int] = frozenset()) -> dict[int, str]:  # pyright: ignore[reportArgumentType]
    """Wait until no process with `mark` is left, or for so long; those that are left.

    Args:
        mark: As in `marked`.
        within_s: How long.
        but: Processes that do not count.
    """
    until = time.monotonic() + within_s
    while True:
        found = {pid: words for pid, words in marked(mark).items() if pid not in but}
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.1)


def end_marked(mark: str) -> None:
    """End what is left of a run of this benchmark."""
    for pid in marked(mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def left_files(temporary: Path, shared_before: set[str]) -> list[str]:
    """What farspan has left in a run's folder for temporary files, and in the machine's shared memory.

    Args:
        temporary: The folder.
        shared_before: What was in shared memory before the run.
    """
    found = [str(path) for path in temporary.glob("*farspan*")]
    return found + [name for name in shared_names() if name not in shared_before and "farspan" in name]


def shared_names() -> set[str]:
    """The names in shared memory."""
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
