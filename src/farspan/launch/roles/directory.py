"""Says where the services of a run are: who exposes one tells its name and socket, who wants it asks by name.

    a process   {"is": "expose", "id": 1, "name": "buffer", "socket": "4711-1", "who": "learner 0"}
    directory   {"id": 1, "socket": "4711-1", "who": "learner 0"}              or whose it is already
    another     {"is": "find", "id": 1, "name": "buffer", "but": ""}           but: a socket that is known to be dead
    directory   {"id": 1, "socket": "4711-1", "who": "learner 0"}              as soon as there is one
    another     {"is": "list", "id": 2}
    directory   {"id": 2, "names": ["buffer"]}

A name belongs to the connection over which it came: it is free again when that ends, however the process has ended.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass
from typing import Any

from farspan.launch.membership.lines import Lines, listen_in

__all__ = ["Directory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    owner: Lines
    socket: str
    who: str


class Directory:
    """Answers the processes of a run, a thread for each.

    Args:
        folder: Where it and all services listen; only this user can enter it.
    """

    def __init__(self, folder: str) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._waiting: dict[str, list[tuple[Lines, int]]] = {}
        """For each name that is not there, who waits for it."""
        self._open: set[Lines] = set()
        self._listener = listen_in(folder)
        threading.Thread(target=self._accept, name="farspan-directory", daemon=True).start()

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
            threading.Thread(target=self._serve, args=(Lines(sock),), daemon=True).start()

    def _serve(self, lines: Lines) -> None:
        with self._lock:
            self._open.add(lines)
        try:
            while True:
                message = lines.receive()
                with self._lock:
                    self._hear(lines, message)
        except (EOFError, KeyError, TypeError, ValueError):
            with self._lock:
                self._forget(lines)
                lines.close()

    def _hear(self, lines: Lines, message: dict[str, Any]) -> None:
        kind, name = message["is"], str(message.get("name", ""))
        if kind == "expose":
            entry = self._entries.setdefault(
                name, _Entry(owner=lines, socket=str(message["socket"]), who=str(message["who"]))
            )
            lines.send(_found(message["id"], entry))
            for other, number in self._waiting.pop(name, ()):
                other.send(_found(number, entry))
        elif kind == "withdraw":
            if name in self._entries and self._entries[name].owner is lines:
                del self._entries[name]
        elif kind == "find":
            entry = self._entries.get(name)
            if entry is not None and entry.socket != message["but"]:
                lines.send(_found(message["id"], entry))
            else:
                self._waiting.setdefault(name, []).append((lines, int(message["id"])))
        elif kind == "list":
            lines.send({"id": message["id"], "names": sorted(self._entries)})

    def _forget(self, lines: Lines) -> None:
        self._open.discard(lines)
        for name in [name for name, entry in self._entries.items() if entry.owner is lines]:
            del self._entries[name]
        for name, waiting in self._waiting.items():
            self._waiting[name] = [item for item in waiting if item[0] is not lines]


def _found(number: int, entry: _Entry) -> dict[str, Any]:
    return {"id": number, "socket": entry.socket, "who": entry.who}
