"""Daemon threads, one for each thing that a rank does for another: a blocked one delays neither others nor the exit.

(A ThreadPoolExecutor joins its threads when the interpreter ends: one blocked job would keep the process.)
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

__all__ = ["Workers"]


class Workers:
    """Threads that are made when they are needed, and used again.

    Args:
        name: Of the threads, before a number.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_idle = 0
        self._threads: list[threading.Thread] = []
        self._stopped = False

    def submit(self, job: Callable[[], None]) -> bool:
        """Runs `job`, which must not raise, in a thread of its own; returns whether it will run: not after `stop`."""
        with self._lock:
            if self._stopped:
                return False
            if self._num_idle:
                self._num_idle -= 1
            else:
                name = f"{self._name}-{len(self._threads) + 1}"
                self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                self._threads[-1].start()
            self._jobs.put(job)
            return True

    def stop(self, deadline_s: float) -> None:
        """Idle threads end now, busy ones after their job: one that is still in torch when the interpreter ends, aborts
        the process. Who waits longer than the deadline, waits in Python, where that does no harm.
        """
        with self._lock:
            self._stopped = True
            for _ in self._threads:
                self._jobs.put(None)
        until = time.monotonic() + deadline_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it must not keep what it worked on alive while idle
            with self._lock:
                self._num_idle += 1
