"""The exit code with which the program ends itself: Python tells nobody of it while a process ends."""

from __future__ import annotations

import functools
import sys
from typing import Any, NoReturn

__all__ = ["exit_code", "watch_exit"]

_CODE_OF_TEXT = 1
_codes: list[int] = []


@functools.cache
def watch_exit() -> None:
    """Notes from now on what `sys.exit` is given."""
    original = sys.exit

    @functools.wraps(original)
    def exit_noted(status: Any = None, /) -> NoReturn:
        is_number = status is None or isinstance(status, int)
        _codes.append((status or 0) & 0xFF if is_number else _CODE_OF_TEXT)
        original(status)

    sys.exit = exit_noted


def exit_code() -> int:
    """Returns what `sys.exit` was given last; 0 if it has not been called."""
    return _codes[-1] if _codes else 0
