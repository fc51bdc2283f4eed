"""Says on the console what takes longer than a few seconds, and how far it is.

    with said_if_slow("measuring the first step", console.warn) as progress:
        ...
        progress.note(12, 32, "micro-batches")

    after 3 s     farspan: measuring the first step: 12 of 32 micro-batches
    after 6 s     farspan: measuring the first step: 25 of 32 micro-batches

The next line comes after 12 s, then 24 s. What is over sooner says nothing. A thread waits beside the work and ends
with it, so that a single long call is said too.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from farspan.units import count_of

__all__ = ["PATIENCE_S", "Progress", "SpreadWork", "said_if_slow"]

PATIENCE_S = 3.0
"""Seconds for which work is silent."""
_thread = threading.local()


class Progress:
    """How far a piece of work is, for people.

    Args:
        what: The work: "searching for a plan".
        waiting: Whom it waits for at the moment: "waiting for rank 1 to begin step 3"; "" for nobody.

    Example:
        >>> progress = Progress("searching for a plan")
        >>> progress.described(5.2)
        'farspan: searching for a plan for 5 s'
        >>> progress.note(3, 4, "parameters")
        >>> progress.described(5.2)
        'farspan: searching for a plan: 3 of 4 parameters'
    """

    def __init__(self, what: str, waiting: Callable[[], str] = str) -> None:
        self.what = what
        self._waiting = waiting
        self._far = ""

    def note(self, done: int, total: int, noun: str) -> None:
        """So many of all there are, in the plural, are done."""
        self._far = f"{done} of {total} {noun}"

    def described(self, elapsed_s: float) -> str:
        """Returns the line that says it."""
        text = f"farspan: {self.what}: {self._far}" if self._far else f"farspan: {self.what} for {elapsed_s:.0f} s"
        waiting = self._waiting()
        return f"{text}, {waiting}" if waiting else text


@contextlib.contextmanager
def said_if_slow(what: str, say: Callable[[str], None] | None, waiting: Callable[[], str] = str) -> Iterator[Progress]:
    """Let the work in the body be said where it takes long; work inside such work is not said by itself.

    Args:
        what: The work: "searching for a plan".
        say: Is given each line, by another thread; None where this process says nothing.
        waiting: As of `Progress`.
    """
    progress = Progress(what, waiting)
    if say is None or getattr(_thread, "is_said", False):
        yield progress
        return
    is_over, began_s, patience_s = threading.Event(), time.monotonic(), PATIENCE_S

    def watch() -> None:
        due_s = patience_s
        while not is_over.wait(began_s + due_s - time.monotonic()):
            say(progress.described(due_s))
            due_s *= 2

    watcher = threading.Thread(target=watch, name="farspan progress", daemon=True)
    watcher.start()
    _thread.is_said = True
    try:
        yield progress
    finally:
        _thread.is_said = False
        is_over.set()
        watcher.join()


class SpreadWork:
    """Work in many short parts between which the program goes on, said after a part once all together take long.

    Args:
        what: The work.
        noun: One of its parts.
    """

    def __init__(self, what: str, noun: str) -> None:
        self.say: Callable[[str], None] | None = None
        self.has_begun = False
        self._what, self._noun = what, noun
        self.end()

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """The body is one of its parts."""
        began_s = time.monotonic()
        self.has_begun = True
        try:
            yield
        finally:
            self._num_parts += 1
            self._spent_s += time.monotonic() - began_s
            if self._spent_s >= self._due_s and self.say is not None and not getattr(_thread, "is_said", False):
                what = f"{self._what}, {count_of(self._num_parts, self._noun)} so far,"
                self.say(Progress(what).described(self._spent_s))
                while self._due_s <= self._spent_s:
                    self._due_s *= 2

    def end(self) -> None:
        """All parts are over; later ones belong to other work."""
        self.has_begun = False
        self._num_parts, self._spent_s, self._due_s = 0, 0.0, PATIENCE_S
