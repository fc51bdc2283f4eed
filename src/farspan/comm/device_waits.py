"""Deadlines of waits in which a device stands, and no host: a thread watches the devices.

host      F0  wait(a)  F1  wait(b)  F2 ..         runs ahead, and queues work for the device
device    F0 .. a .......... F1 b F2              the deadline counts from where it comes to a wait
thread            looks  looks: nobody has sent a, so every rank hears who waits for what, and the transfers end
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from farspan.comm.transport import DeviceWork
from farspan.errors import FarspanError

__all__ = ["DeviceWaits"]

_PERIOD_S = 0.02


class DeviceWaits:
    """Watches the waits of this rank's devices, one after the other.

    Args:
        deadline_s: How long a device may stand in one of them.
        on_late: Called, in another thread, with the error of the first wait that takes longer.
    """

    def __init__(self, deadline_s: float, on_late: Callable[[FarspanError], None]) -> None:
        self.deadline_s = deadline_s
        self.on_late = on_late
        self._queue: queue.SimpleQueue[tuple[DeviceWork, Callable[[], FarspanError]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, work: DeviceWork, late: Callable[[], FarspanError]) -> None:
        """Look after a wait that has been queued on a device.

        Args:
            work: What the device waits for.
            late: Makes the error that says who waits for what.
        """
        self._queue.put((work, late))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="farspan-device-waits", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            work, late = self._queue.get()
            if not self._ends_in_time(work):
                with contextlib.suppress(FarspanError):  # another rank's failure is known already
                    self.on_late(late())
                return

    def _ends_in_time(self, work: DeviceWork) -> bool:
        """Return when it has ended, or the device has stood in it for too long."""
        began: float | None = None
        while not work.is_done():
            now = time.monotonic()
            if began is None and work.has_begun():
                began = now
            if began is not None and now - began > self.deadline_s:
                return False
            time.sleep(_PERIOD_S)  # torch can wait for an event of a device, but not with a deadline
        return True
