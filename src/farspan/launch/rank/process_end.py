"""What a process does when its program is over, after all that the program itself wants done then.

Python calls what was registered last first. `import farspan` registers this, so a program that saves its model in a
handler of its own still has all ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
from collections.abc import Callable
from typing import Any

__all__ = ["at_process_end", "end_process", "write_open_files"]

_actions: list[Callable[[], None]] = []


def at_process_end(action: Callable[[], None]) -> None:
    """Let `action` be called when this process ends, before all that were given earlier."""
    _actions.append(action)


@atexit.register
def end_process() -> None:
    """Does it now: for a process that ends in another way than Python's own."""
    while _actions:
        _actions.pop()()
    write_open_files()


def write_open_files() -> None:
    """Writes what the program has left in the buffers of files that it has not closed.

    Python closes such a file once nothing holds it. What farspan still has of the program (its model, whose code holds
    its globals) is never released, and what is in the buffers would be lost.
    """
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    files: list[Any] = [item for item in gc.get_objects() if issubclass(type(item), kinds)]
    files.sort(key=lambda file: not isinstance(file, io.TextIOWrapper))  # a text goes into the buffer below it
    for file in files:
        with contextlib.suppress(OSError, ValueError):  # it has been closed, or its other end has
            file.flush()
