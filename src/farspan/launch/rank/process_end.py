"""What a process does when its program is over, after all that the program itself wants done then.

Python calls what was registered last first. `import farspan` registers this, so a program that saves its model in a
handler of its own still has all ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import sys
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
    texts, buffers = (io.TextIOWrapper,), (io.BufferedWriter, io.BufferedRandom)
    kinds = [(texts, "flush"), (_compressed_files(), "close"), (buffers, "flush")]  # each lies on the next
    items: list[object] = gc.get_objects()
    classes = {type(item) for item in items}  # each is asked once: there are a million objects, and few classes
    for kind, end in kinds:
        of_kind = {each for each in classes if issubclass(each, kind)}
        for file in [item for item in items if type(item) in of_kind]:
            with contextlib.suppress(OSError, ValueError):  # it has been closed, or its other end has
                getattr(file, end)()


def _compressed_files() -> tuple[Any, ...]:
    """Returns the classes of files whose last part is written when they are closed, of those that are loaded."""
    names = {"gzip": "GzipFile", "bz2": "BZ2File", "lzma": "LZMAFile", "zipfile": "ZipFile"}
    return tuple(getattr(sys.modules[module], name) for module, name in names.items() if module in sys.modules)
