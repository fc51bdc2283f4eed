"""Says where the services of a run are: who exposes one tells its name and socket, who wants it asks by name.

    a process   {"is": "expose", "id": 1, "name": "buffer", "socket": "4711-1", "port": 0, "who": "learner 0"}
    directory   {"id": 1, "socket": "4711-1", "address": "", "port": 0, "who": "learner 0"}    or whose it is already
    another     {"is": "find", "id": 1, "name": "buffer", "but": ""}           but: a socket that is known to be dead
    directory   {"id": 1, "socket": ..., "who": "learner 0"}                   as soon as there is one
    another     {"is": "list", "id": 2}
    directory   {"id": 2, "names": ["buffer"]}

The address is that of the host of who exposes, as the host of who asks reaches it; "" on the same host. Processes of
other hosts come by the agents there (`relay`). A name belongs to the connection over which it came: it is free again
when that ends, however the process has ended, and when its host is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from farspan.launch.membership.entrance import Entrance
from farspan.launch.membership.lines import Lines, Message

__all__ = ["Away", "Directory"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Client:
    """A process that has connected.

    Attributes:
        host: Where it runs; "" for that of the launcher.
        send: Sends it a message.
    """

    host: str
    send: Callable[[Message], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    owner: _Client
    socket: str
    port: int
    who: str


class Directory:
    """Answers the processes of a run, a thread for each of this host.

    Args:
        folder: Where it and all services listen; only this user can enter it.
        address: Returns the address of a host, as another one reaches it.
    """

    def __init__(self, folder: str, address: Callable[[str, str], str] = lambda host, viewer: "") -> None:
        self._address = address
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._waiting: dict[str, list[tuple[_Client, int]]] = {}
        """For each name that is not there, who waits for it."""
        self._entrance = Entrance(folder, self._serve, "farspan-directory")

    def close(self) -> None:
        """Ends all connections with processes of this host."""
        self._entrance.close()

    def away(self, host: str, send: Callable[[int, Message], None]) -> Away:
        """Returns what takes in the processes of another host.

        Args:
            host: Which.
            send: Sends a message to a process there, by its number.
        """
        return Away(self, host, send)

    def hear(self, client: _Client, message: Message) -> None:
        """Takes what a process says.

        Raises:
            KeyError, TypeError, ValueError: It is no message.
        """
        with self._lock:
            self._hear(client, message)

    def forget(self, client: _Client) -> None:
        """Takes the end of a process."""
        with self._lock:
            for name in [name for name, entry in self._entries.items() if entry.owner is client]:
                del self._entries[name]
            for name, waiting in self._waiting.items():
                self._waiting[name] = [item for item in waiting if item[0] is not client]

    def _serve(self, lines: Lines) -> None:
        client = _Client(host="", send=lines.send)
        try:
            while True:
                self.hear(client, lines.receive())
        except (EOFError, KeyError, TypeError, ValueError):
            self.forget(client)

    def _hear(self, client: _Client, message: Message) -> None:
        kind, name = message["is"], str(message.get("name", ""))
        if kind == "expose":
            socket, port, who = str(message["socket"]), int(message["port"]), str(message["who"])
            entry = self._entries.setdefault(name, _Entry(owner=client, socket=socket, port=port, who=who))
            self._send_found(client, message["id"], entry)
            for other, number in self._waiting.pop(name, ()):
                self._send_found(other, number, entry)
        elif kind == "withdraw":
            if name in self._entries and self._entries[name].owner is client:
                del self._entries[name]
        elif kind == "find":
            entry = self._entries.get(name)
            if entry is not None and entry.socket != message["but"]:
                self._send_found(client, message["id"], entry)
            else:
                self._waiting.setdefault(name, []).append((client, int(message["id"])))
        elif kind == "list":
            client.send({"id": message["id"], "names": sorted(self._entries)})

    def _send_found(self, client: _Client, number: int, entry: _Entry) -> None:
        host = entry.owner.host
        address = "" if host == client.host else self._address(host, client.host)
        found: dict[str, Any] = {"socket": entry.socket, "address": address, "port": entry.port, "who": entry.who}
        client.send({"id": number, **found})


class Away:
    """The processes of another host, as the directory knows them."""

    def __init__(self, directory: Directory, host: str, send: Callable[[int, Message], None]) -> None:
        self._directory = directory
        self._host = host
        self._send = send
        self._clients: dict[int, _Client] = {}

    def hear(self, number: int, message: Message) -> None:
        """Takes what a process says, or that it has ended; one thread calls this."""
        if number not in self._clients:
            self._clients[number] = _Client(host=self._host, send=lambda answer: self._send(number, answer))
        try:
            if message["is"] != "ended":
                self._directory.hear(self._clients[number], message)
                return
        except (KeyError, TypeError, ValueError):  # what is no message ends its own connection alone
            self._send(number, {"is": "closed"})
        self._directory.forget(self._clients.pop(number))

    def close(self) -> None:
        """The host is lost, and all processes there with it."""
        for client in self._clients.values():
            self._directory.forget(client)
        self._clients.clear()
