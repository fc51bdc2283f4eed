"""The processes of the next start, begun while the ranks still run: torch is loaded before they are needed.

    a rank has saved --> processes of the next start --> load modules, wait at the gate --a rank is lost--> the script
                                                                        |
                                                                        +--the run is over--> they are ended

Each is started as any rank is, and has run nothing of the script's. The gate is a named pipe: who opens it for reading
waits until it is open for writing; once it is open it has no name any more, and who comes then finds none.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable

from farspan.launch.attempts.attempt import Attempt
from farspan.launch.job import Due, Events
from farspan.launch.rank.notes import GATE_VARIABLE, SAVED_VARIABLE

__all__ = ["Standby"]


class Standby:
    """Has the next start ready.

    Args:
        events: By which the thread that starts ranks learns that it is to start them.
        prepare: Gives the next start, from the variables that its processes get besides; None if there is to be none.
    """

    def __init__(self, events: Events, prepare: Callable[[dict[str, str]], Attempt | None]) -> None:
        self._events = events
        self._prepare = prepare
        self._folder = tempfile.mkdtemp(prefix="farspan-standby-")
        self._saved = f"{self._folder}/saved"
        os.mkfifo(self._saved, 0o600)
        self._file = os.open(self._saved, os.O_RDWR | os.O_CLOEXEC)
        self._num_gates = 0
        self._gate = ""
        self._open_gates: list[int] = []
        self._ready: Attempt | None = None
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def variables(self) -> dict[str, str]:
        """Returns the variable by which ranks say that they have saved."""
        return {SAVED_VARIABLE: self._saved}

    def take(self) -> Attempt | None:
        """Returns the next start, whose processes run the script from now on; None where there is none yet."""
        ready, self._ready = self._ready, None
        if ready is not None:
            self._open_gates.append(os.open(self._gate, os.O_RDWR | os.O_CLOEXEC))  # as long as some may be on the way
            os.unlink(self._gate)
        return ready

    def close(self) -> None:
        """Ends what has not had its turn."""
        os.write(self._file, b"x")
        self._thread.join()
        if self._ready is not None:
            self._ready.discard()
        for file in (*self._open_gates, self._file):
            os.close(file)
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):
                os.unlink(f"{self._folder}/{name}")
            os.rmdir(self._folder)

    def _listen(self) -> None:
        while os.read(self._file, 1) == b"s":
            self._events.put(Due(action=self._begin))

    def _begin(self) -> None:
        if self._ready is not None:
            return
        self._num_gates += 1
        self._gate = f"{self._folder}/gate-{self._num_gates}"
        os.mkfifo(self._gate, 0o600)
        self._ready = self._prepare({GATE_VARIABLE: self._gate})
        if self._ready is not None:
            self._ready.start()
