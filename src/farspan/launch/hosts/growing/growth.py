"""Hosts that come while the ranks run take part from the next save on.

a host comes --> rank 0 saves --> the ranks are ended (`Cut`) --> all are started again, on one host more
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from farspan.launch.job import Cut, Events

__all__ = ["Growth"]


class Growth:
    """Waits for the next save, where a host waits for it.

    Args:
        events: By which the ranks are ended.
        pipe: Opened by rank 0 at each save; that opens it here too.
        is_due: Returns whether a host waits that can take part.
    """

    def __init__(self, events: Events, pipe: str, is_due: Callable[[], bool]) -> None:
        self._events = events
        self._pipe = pipe
        self._is_due = is_due
        self._lock = threading.Lock()
        self._is_watching = False

    def watch(self) -> None:
        """Ends the ranks at their next save, if a host waits then. From any thread."""
        with self._lock:
            if self._is_watching or not self._is_due():
                return
            self._is_watching = True
        threading.Thread(target=self._wait, name="farspan-growth", daemon=True).start()

    def _wait(self) -> None:
        try:
            os.close(os.open(self._pipe, os.O_RDONLY | os.O_CLOEXEC))  # not before a rank opens it
        except FileNotFoundError:  # the run is over
            return
        with self._lock:
            self._is_watching = False
        self._events.put(Cut(is_due=self._is_due))
