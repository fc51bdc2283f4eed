"""Memory that outlives the processes of a run, for what they save there (`farspan.save(..., memory=True)`)."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile

from farspan.launch.sweep import Sweeper

__all__ = ["MEMORY_VARIABLE", "Memory"]

MEMORY_VARIABLE = "FARSPAN_MEMORY"
"""Names the folder in memory."""
_SHARED_MEMORY = "/dev/shm"


class Memory:
    """A folder in memory, until it is closed or this process has ended.

    Attributes:
        path: Of the folder; "" where the system has no memory that looks like a disk.
    """

    def __init__(self) -> None:
        self.path = ""
        self._sweeper: Sweeper | None = None
        if os.path.isdir(_SHARED_MEMORY):
            with contextlib.suppress(OSError):  # it is full, or may not be written: nothing can be saved there
                self.path = tempfile.mkdtemp(prefix="farspan-memory-", dir=_SHARED_MEMORY)
                self._sweeper = Sweeper(self.path)

    def close(self) -> None:
        """Frees the memory."""
        if self.path:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._sweeper is not None:
            self._sweeper.close()
