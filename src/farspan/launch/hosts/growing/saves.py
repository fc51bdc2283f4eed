"""Lets the launcher know of each save of a rank 0 that is on another host.

rank 0 --opens a pipe at each save--> its agent --a message--> launcher --opens the pipe of the run--> who waits for it
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

__all__ = ["Saves"]

_END = b"e"


class Saves:
    """Listens for saves, in a thread of its own.

    Args:
        path: Where the pipe is made, which a rank opens after each save and writes to.
        on_save: Called after each.
    """

    def __init__(self, path: str, on_save: Callable[[], None]) -> None:
        os.mkfifo(path, 0o600)
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # so that it has a writer, and no end
        self._on_save = on_save
        threading.Thread(target=self._listen, name="farspan-saves", daemon=True).start()

    def close(self) -> None:
        """Ends the thread; the pipe goes with its folder."""
        os.write(self._file, _END)

    def _listen(self) -> None:
        while _END not in os.read(self._file, 1 << 12):
            self._on_save()
        os.close(self._file)
