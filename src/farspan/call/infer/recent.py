"""A table that forgets what has not been used for a while: a program of ever new sizes needs no more memory for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Recent"]

_FEW, _MANY = 256, 4096
_FLUSHES = 32


class Recent:
    """A table that keeps what was used since the last turn, and what was used between the last two.

    A turn comes after 32 flushes; not while the table is small.
    """

    def __init__(self) -> None:
        self._used: dict[Any, Any] = {}
        self._before: dict[Any, Any] = {}
        self._num_flushes = 0

    def get(self, key: Any) -> Any:
        """Returns the value of a key, or None."""
        value = self._used.get(key)
        if value is None and self._before:
            value = self._before.pop(key, None)
            if value is not None:
                self._used[key] = value
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        self._used[key] = value
        if len(self._used) >= _MANY:
            self._turn()

    def __len__(self) -> int:
        return len(self._used) + len(self._before)

    def flushed(self) -> None:
        """The program has run what it had recorded."""
        self._num_flushes += 1
        if self._num_flushes >= _FLUSHES and len(self._used) >= _FEW:
            self._turn()

    def forget(self, is_gone: Callable[[Any], bool]) -> None:
        """Drop the keys for which `is_gone` holds."""
        for table in (self._used, self._before):
            for key in [key for key in table if is_gone(key)]:
                del table[key]

    def _turn(self) -> None:
        self._used, self._before, self._num_flushes = {}, self._used, 0
