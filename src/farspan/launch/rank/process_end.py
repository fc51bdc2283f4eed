"""What a process does when its program is over, after all that the program itself wants done then.

Python calls what was registered last first. `import farspan` registers this, so a program that saves its model in a
handler of its own still has all ranks.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable

__all__ = ["at_process_end"]

_actions: list[Callable[[], None]] = []


def at_process_end(action: Callable[[], None]) -> None:
    """Let `action` be called when this process ends, before all that were given earlier."""
    _actions.append(action)


@atexit.register
def _end() -> None:
    while _actions:
        _actions.pop()()
