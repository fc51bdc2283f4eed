"""Locks with a deadline: no wait for one is endless."""

from __future__ import annotations

import threading

from farspan.errors import DeadlineError

__all__ = ["Lock"]

_DEADLINE_S = 300.0


class Lock:
    """A lock for `with`; the thread that holds it may take it again.

    Args:
        name: Of what it guards, for people.
        deadline_s: The longest wait for it, in seconds.
    """

    def __init__(self, name: str, deadline_s: float = _DEADLINE_S) -> None:
        self.name = name
        self.deadline_s = deadline_s
        self._lock = threading.RLock()
        self._holder = ""

    def __enter__(self) -> None:
        """Take it.

        Raises:
            DeadlineError: Another thread has held it all the time.
        """
        if not self._lock.acquire(timeout=self.deadline_s):
            raise DeadlineError(
                f"thread {threading.current_thread().name} waited {self.deadline_s:g} s for {self.name}.",
                why=f"thread {self._holder} of this process has held it all that time.",
                hint="see where the threads stand: py-spy dump --pid, or faulthandler.dump_traceback(all_threads=True)",
            )
        self._holder = threading.current_thread().name

    def __exit__(self, *_: object) -> None:
        self._lock.release()
