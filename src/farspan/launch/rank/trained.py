"""Whether a script that `farspan run` has started trains, and whether its ranks have found each other.

Two empty files in the folder of the run: a script that trains and never calls `farspan.distribute` trains copies.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from farspan.launch.rank.imports import when_imported

__all__ = ["note_joining", "note_training", "trains_copies"]

_JOINED, _TRAINED = "joined", "trained"


def note_training(folder: str) -> None:
    """See the first step of an optimizer of this process."""

    def watch(module: Any) -> None:
        notes = iter([functools.partial(_note, folder, _TRAINED)])

        def note(*_: object) -> None:  # stays, for a hook cannot remove itself while hooks run
            next(notes, _nothing)()

        module.register_optimizer_step_pre_hook(note)

    when_imported("torch.optim.optimizer", watch)


def note_joining() -> None:
    """Say to `farspan run`, if it has started this process, that the ranks have found each other."""
    folder = os.environ.get("FARSPAN_RUN_FOLDER", "")
    if folder:
        _note(folder, _JOINED)


def trains_copies(folder: str) -> bool:
    """Whether a process has trained, and none has looked for the others."""
    return os.path.exists(f"{folder}/{_TRAINED}") and not os.path.exists(f"{folder}/{_JOINED}")


def _nothing() -> None:
    pass


def _note(folder: str, name: str) -> None:
    if os.path.isdir(folder):
        os.close(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT, 0o600))
