"""What a process does when its program is over, after all that the program itself wants done then.

Python calls what was registered last first. `import farspan` registers this, so a program that saves its model in a
handler of its own still has all ranks.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable

__all__ = ["at_process_end", "end_process"]

_actions: list[Callable[[], None]] = []


def at_process_end(action: Callable[[], None]) -> None:
    """Let `action` be called when this process ends, before all that were given earlier."""
    _actions.append(action)


@atexit.register
def end_process() -> None:
    """Does it now: for a process that ends in another way than Python's own."""
    while _actions:
        _actions.pop()()
