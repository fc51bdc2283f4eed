"""Keeps what this rank waits for, for a line to people: the program's thread writes it, the listener's reads it."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farspan.control.wire import Header

__all__ = ["Waits"]

_LONG_S = 30.0
_BRIEF_S = 1.0


class _Wait:
    __slots__ = ("about", "began", "is_said", "outer", "to_do", "waits")

    def __init__(self, waits: Waits, to_do: Callable[[], str], about: Header) -> None:
        self.waits, self.to_do, self.about = waits, to_do, about
        self.began = time.monotonic()
        self.is_said = False

    def __enter__(self) -> None:
        self.outer = self.waits.current
        self.waits.current = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.waits.current = self.outer


class Waits:
    """The wait that the program's thread is in, if it is in one.

    Args:
        long_s: After how long a wait is worth a line.
    """

    def __init__(self, long_s: float = _LONG_S) -> None:
        self.long_s = long_s
        self.current: _Wait | None = None

    def until(self, to_do: Callable[[], str], about: Header) -> _Wait:
        """Notes a wait for as long as the `with` block runs.

        Args:
            to_do: What others have not done: "to begin step 3".
            about: Whom the hub is to look for: a step, the key of a gather, a rank, or whoever has not finished.
        """
        return _Wait(self, to_do, about)

    def find_long(self) -> Header | None:
        """Returns what the hub needs to know of a wait that has become long; once for each wait."""
        wait = self.current
        if wait is None or wait.is_said or time.monotonic() - wait.began < self.long_s:
            return None
        wait.is_said = True
        return {"t": "late", "to_do": wait.to_do(), "for_s": round(time.monotonic() - wait.began), **wait.about}

    @property
    def about(self) -> Header | None:
        """Whom the wait is for, as the hub is asked; None where the program does not wait."""
        wait = self.current
        return None if wait is None else wait.about

    def describe_other(self) -> str:
        """Returns whom the program waits for, and to do what; "" if it does not wait, or has only begun to."""
        wait = self.current
        if wait is None or time.monotonic() - wait.began < _BRIEF_S:
            return ""
        who = f"rank {wait.about['rank']}" if "rank" in wait.about else "other ranks"
        return f"waiting for {who} {wait.to_do()}"

    def describe(self) -> str:
        """Returns in a line what the program waits for; "" if it does not wait."""
        wait = self.current
        if wait is None:
            return ""
        return f"it has waited {time.monotonic() - wait.began:.0f} s for others {wait.to_do()}"
