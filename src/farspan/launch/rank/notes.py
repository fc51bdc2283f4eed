"""Notes, as files, that the processes of `farspan run` and their launcher leave for each other.

    trained       by a rank    an optimizer has stepped: a script that never calls farspan.distribute trains copies
    waiting-1     by rank 1    it has called farspan.distribute, and waits for the others
    joined        by any rank  all have found each other
    ended-1       by launcher  rank 1 has ended before that
    heard-1       by rank 1    it ends because another rank has failed: its log may be on a full disk

Each note is an empty file in the folder of the run. Where a run is started again after a failure, rank 0 also writes
the step of the newest checkpoint into a file that outlives each start.
"""

from __future__ import annotations

import contextlib
import functools
import os
import posix
import re
from collections.abc import Iterable
from typing import Any

from farspan.launch.rank.imports import when_imported

__all__ = [
    "EACH_SAVE_VARIABLE",
    "GATE_VARIABLE",
    "PROGRESS_VARIABLE",
    "SAVED_VARIABLE",
    "add_notes",
    "all_notes",
    "end_noting_training",
    "has_ended",
    "has_joined",
    "heard_ranks",
    "note_end",
    "note_hearing",
    "note_joining",
    "note_saving",
    "note_training",
    "note_waiting",
    "saved_step",
    "trains_copies",
    "waiting_ranks",
]

PROGRESS_VARIABLE = "FARSPAN_PROGRESS"
"""Names the file for the step of the newest checkpoint."""
SAVED_VARIABLE = "FARSPAN_SAVED"
"""Names the pipe through which rank 0 says that there is something to go on from."""
EACH_SAVE_VARIABLE = "FARSPAN_EACH_SAVE"
"""Names the pipe that rank 0 opens at each save, for whoever waits for the next one."""
GATE_VARIABLE = "FARSPAN_GATE"
"""Names what a process that is started ahead of its turn waits for."""
_TRAINED, _JOINED = "trained", "joined"
_WAITING, _ENDED, _HEARD = "waiting-", "ended-", "heard-"
_OF_RANKS = re.compile(rf"{_TRAINED}|{_JOINED}|(?:{_WAITING}|{_HEARD})[0-9]{{1,9}}")
_training_hooks: list[Any] = []


def note_training(folder: str) -> None:
    """See the first step of an optimizer of this process."""

    def watch(module: Any) -> None:
        notes = iter([functools.partial(_note, folder, _TRAINED)])

        def note(*_: object) -> None:  # stays, for a hook cannot remove itself while hooks run
            next(notes, _nothing)()

        _training_hooks.append(module.register_optimizer_step_pre_hook(note))

    when_imported("torch.optim.optimizer", watch)


def end_noting_training() -> None:
    """The script distributes a model: what it trains are no copies, and optimizers' steps have one hook less."""
    while _training_hooks:
        _training_hooks.pop().remove()


def note_waiting(rank: int) -> None:
    """Say to `farspan run`, if it has started this process, that this rank waits for the others."""
    _note(os.environ.get("FARSPAN_RUN_FOLDER", ""), f"{_WAITING}{rank}")


def note_joining() -> None:
    """Say to `farspan run`, if it has started this process, that the ranks have found each other."""
    _note(os.environ.get("FARSPAN_RUN_FOLDER", ""), _JOINED)


def has_ended(rank: int) -> bool:
    """Returns whether `farspan run` has seen that rank end before the ranks have found each other."""
    folder = os.environ.get("FARSPAN_RUN_FOLDER", "")
    return bool(folder) and os.path.exists(f"{folder}/{_ENDED}{rank}")


def note_end(folder: str, rank: int) -> None:
    """The launcher's word that a process has ended."""
    _note(folder, f"{_ENDED}{rank}")


def waiting_ranks(folder: str) -> set[int]:
    """Returns the ranks that wait for others to call `farspan.distribute`; none once all have found each other."""
    return set() if has_joined(folder) else _ranks_that_noted(folder, _WAITING)


def note_hearing(rank: int) -> None:
    """Say to `farspan run`, if it has started this process, that this rank ends because another one has failed."""
    _note(os.environ.get("FARSPAN_RUN_FOLDER", ""), f"{_HEARD}{rank}")


def heard_ranks(folder: str) -> set[int]:
    """Returns the ranks that ended because another one has failed."""
    return _ranks_that_noted(folder, _HEARD)


def note_saving(step: int, path: str | None = None, pipes: Iterable[str] | None = None) -> None:
    """Say to `farspan run`, if it may start this program again, that a checkpoint of this step is on the disk.

    Args:
        step: Of the checkpoint.
        path: The file; None for that of this process.
        pipes: Opened for those who wait for it; None for those of this process.
    """
    path = os.environ.get(PROGRESS_VARIABLE, "") if path is None else path
    if path:
        with open(f"{path}.new", "w") as file:
            file.write(str(step))
        os.replace(f"{path}.new", path)
    if pipes is None:  # the first time; each time
        pipes = (os.environ.pop(SAVED_VARIABLE, ""), os.environ.get(EACH_SAVE_VARIABLE, ""))
    for pipe in filter(None, pipes):
        with contextlib.suppress(OSError):  # nobody waits for it, or not any more
            file = posix.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            posix.write(file, b"s")
            posix.close(file)


def saved_step(path: os.PathLike[str]) -> int | None:
    """Returns the step that was noted last, None if there is none."""
    try:
        with open(path) as file:
            return int(file.read())
    except (FileNotFoundError, ValueError):
        return None


def has_joined(folder: str) -> bool:
    """Returns whether a rank has noted in `folder` that all have found each other."""
    return os.path.exists(f"{folder}/{_JOINED}")


def trains_copies(folder: str) -> bool:
    """Returns whether a process has trained while none has looked for the others."""
    return os.path.exists(f"{folder}/{_TRAINED}") and not has_joined(folder)


def all_notes(folder: str) -> list[str]:
    """Returns the names of what ranks have noted, for the launcher on another host."""
    return sorted(name for name in os.listdir(folder) if _OF_RANKS.fullmatch(name))


def add_notes(folder: str, names: Iterable[str]) -> None:
    """Notes here what ranks on another host have noted there."""
    for name in names:
        if _OF_RANKS.fullmatch(name):
            _note(folder, name)


def _ranks_that_noted(folder: str, prefix: str) -> set[int]:
    names = os.listdir(folder) if os.path.isdir(folder) else []  # who cleans up temporary files may have removed it
    return {int(name.removeprefix(prefix)) for name in names if name.startswith(prefix)}


def _nothing() -> None:
    pass


def _note(folder: str, name: str) -> None:
    if folder and os.path.isdir(folder):
        os.close(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT, 0o600))
