"""Does what may take long before a start, unless a signal to the launcher comes meanwhile."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future

from farspan.errors import LaunchError
from farspan.launch.job import Events, Noted, Over
from farspan.launch.terminal import say

__all__ = ["HostLostError", "NotStartedError", "do_unless_over", "say_not_started"]


class HostLostError(LaunchError):
    """A host is lost before it has begun with its ranks."""


class NotStartedError(Exception):
    """A signal has come, or the run is over, while the launcher waited for hosts.

    Attributes:
        by: The signal; None if the run is over.
    """

    def __init__(self, by: signal.Signals | None) -> None:
        super().__init__("the run is over" if by is None else by.name)
        self.by = by


def do_unless_over(action: Callable[[], None], events: Events) -> None:
    """Returns when it is done.

    Raises:
        NotStartedError: A signal has come meanwhile, or the run is over.
    """
    result: Future[None] = Future()

    def do() -> None:
        try:
            action()
            result.set_result(None)
        except BaseException as error:
            result.set_exception(error)
        events.put(Noted())

    threading.Thread(target=do, daemon=True).start()
    while not result.done():
        event = events.get()
        if isinstance(event, Over):
            raise NotStartedError(None)
        if isinstance(event, signal.Signals) and event is not signal.SIGUSR1:
            raise NotStartedError(event)
    result.result()


def say_not_started(error: NotStartedError) -> int:
    """Says what has ended the run before a start; returns the exit code."""
    if error.by is None:
        return 1
    say(f"farspan run: ended by {error.by.name} while it waited for hosts")
    return 128 + error.by
