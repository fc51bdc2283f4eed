"""Counts how often models have been called: farspan's own draws follow from that, under `distribute(seed=...)`.

A call then draws by its place in the model and by how often the model has been called: a program that is resumed counts
on, so that its masks are not those of its start. What is loaded before `distribute` counts from there.
"""

from __future__ import annotations

import threading
from typing import Any

from farspan.documents import as_list
from farspan.errors import CheckpointError
from farspan.execute.engine import Engine

__all__ = ["count_on", "counts_to_json", "restore_counts"]

_thread = threading.local()
"""`counts`: loaded by this thread's program before its first model was distributed."""


def counts_to_json(engine: Engine) -> list[list[int]]:
    """Returns how often each model has been called, by the model's number."""
    return [[key, count] for key, count in sorted(engine.recorder.root.counts.items())]


def restore_counts(engine: Engine, value: Any, where: str) -> None:
    """Count on from what `counts_to_json` gave."""
    pairs = [as_list(item, where, length=2) for item in as_list(value, where)]
    if not all(type(number) is int for pair in pairs for number in pair):
        raise CheckpointError(f"{where} are no numbers.", hint="another checkpoint")
    counts: dict[int, int] = {pair[0]: pair[1] for pair in pairs}
    if engine.recorder.roots:
        _set(engine, counts)
    else:
        _thread.counts = counts


def count_on(engine: Engine) -> None:
    """The first model of a program has been distributed."""
    counts = vars(_thread).pop("counts", None)
    if counts:
        _set(engine, counts)


def _set(engine: Engine, counts: dict[int, int]) -> None:
    engine.recorder.root.counts.clear()
    engine.recorder.root.counts.update(counts)
