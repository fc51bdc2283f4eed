"""The exit code with which the program ends itself: Python tells nobody of it while a process ends."""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any, NoReturn

from farspan.call.naming import format_where

__all__ = ["exit_code", "exit_words", "watch_exit"]

_CODE_OF_TEXT = 1
_codes: list[int] = []
_words: list[str] = []


@functools.cache
def watch_exit() -> None:
    """Notes from now on what `sys.exit` is given."""
    original = sys.exit

    @functools.wraps(original)
    def exit_noted(status: Any = None, /) -> NoReturn:
        is_number = status is None or isinstance(status, int)
        _codes.append((status or 0) & 0xFF if is_number else _CODE_OF_TEXT)
        caller: FrameType | None = sys._getframe().f_back  # pyright: ignore[reportPrivateUsage]
        where = None if caller is None else (caller.f_code, caller.f_lineno)
        _words.append(f"sys.exit({_codes[-1] if is_number else ''}) at {format_where(where)}")
        original(status)

    sys.exit = exit_noted


def exit_code() -> int:
    """Returns what `sys.exit` was given last; 0 if it has not been called."""
    return _codes[-1] if _codes else 0


def exit_words() -> str:
    """Returns where `sys.exit` was called last, for people; "" if it has not been called."""
    return _words[-1] if _words else ""
