"""Takes in the processes of this host that connect in a folder which only this user can enter."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from farspan.launch.membership.lines import Lines, listen_in

__all__ = ["Entrance"]


class Entrance:
    """Listens in a folder until it is closed.

    Args:
        folder: Where.
        serve: Called with each connection, in a thread for each; it returns when that has ended.
        name: Of the thread that listens, for people.
    """

    def __init__(self, folder: str, serve: Callable[[Lines], None], name: str) -> None:
        self._serve = serve
        self._lock = threading.Lock()
        self._open: set[Lines] = set()
        self._listener = listen_in(folder)
        threading.Thread(target=self._accept, name=name, daemon=True).start()

    def close(self) -> None:
        """Ends all connections."""
        with contextlib.suppress(OSError):  # not every system wakes who accepts by that; its thread is a daemon
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for lines in self._open:
                lines.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve_one, args=(Lines(sock),), daemon=True).start()

    def _serve_one(self, lines: Lines) -> None:
        with self._lock:
            self._open.add(lines)
        try:
            self._serve(lines)
        finally:
            with self._lock:
                self._open.discard(lines)
            lines.close()
