"""A process that belongs to nobody's run and attacks one: `outsider.py WORDS`, the words as JSON (see `Words`).

Until its standard input ends it sends nonsense to the listening ports of the processes that it is told, then prints
what it has done, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.hostile.frames import GLOO, HUB, STORE, framed, hello  # noqa: E402
from benchmarks.hostile.watch import listening_ports  # noqa: E402

_CONNECTING_S = 1.0
_ANSWER_S = 0.05
_NUM_OPEN = 200
_NUM_FLOOD = 60
_KINDS = {"hub": HUB, "gloo": GLOO, "store": STORE}


class Outsider:
    """What it knows: the processes of the run, how many ranks it has, and hellos that it has overheard."""

    def __init__(self, target: str, world_size: int, ports: list[int], overheard: list[bytes], seed: int) -> None:
        self.target = target
        self.world_size = world_size
        self.ports = ports
        self.overheard = overheard
        self.rng = random.Random(f"outsider {seed}")
        self.sent: dict[str, int] = {}
        self.num_welcomes = 0
        self.refused: dict[str, int] = {}
        """How often an attack ended with an error of the connection, by the error."""
        self._open: list[socket.socket] = []

    def attack_once(self) -> None:
        """One of the ways, chosen at random."""
        port, choice = self.rng.choice(self.ports), self.rng.random()
        try:
            if choice < 0.01:
                self._flood(port)
            elif choice < 0.04:
                self._stay(port)
            elif choice < 0.12 and self.overheard:
                self._replay(port)
            else:
                name = self.rng.choice(list(_KINDS[self.target]))
                self._send(port, name, _KINDS[self.target][name](self.rng, self.world_size))
        except OSError as error:
            name = type(error).__name__
            self.refused[name] = self.refused.get(name, 0) + 1

    def _count(self, name: str, number: int = 1) -> None:
        self.sent[name] = self.sent.get(name, 0) + number

    def _connect(self, port: int) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", port), timeout=_CONNECTING_S)
        connection.settimeout(_ANSWER_S)
        return connection

    def _send(self, port: int, name: str, data: bytes) -> None:
        with self._connect(port) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(data)
            self._count(name)
            if self.rng.random() < 0.2:
                self._hear(connection)

    def _hear(self, connection: socket.socket) -> None:
        """Read what is answered until the other end closes; a welcome would mean that a stranger got in."""
        heard = b""
        with contextlib.suppress(OSError):
            while len(heard) < 1 << 16 and (more := connection.recv(4096)):
                heard += more
        self.num_welcomes += b'"t":"welcome"' in heard

    def _replay(self, port: int) -> None:
        """Say again what a rank has said, as it was or with the new challenge in it."""
        with self._connect(port) as connection:
            challenge = connection.recv(4096)
            data = self.rng.choice(self.overheard)
            if self.rng.random() < 0.5:
                with contextlib.suppress(ValueError):
                    said = json.loads(data[16:])
                    fresh = {**said, "nonce": json.loads(challenge[16:]).get("nonce", "")}
                    data = framed(json.dumps(fresh).encode())
            connection.sendall(data)
            self._count("replayed")
            self._hear(connection)

    def _stay(self, port: int) -> None:
        """A connection that stays open and says a byte now and then."""
        self._open.append(self._connect(port))
        data = framed(json.dumps(hello(self.rng, self.world_size)).encode())
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.send(data[:1])
                self._count("single bytes")
        while len(self._open) > _NUM_OPEN:
            self._open.pop(0).close()

    def _flood(self, port: int) -> None:
        """Many connections at once that say nothing and are reset."""
        connections = [self._connect(port) for _ in range(_NUM_FLOOD)]
        for connection in connections:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        self._count("floods", len(connections))


def overhear(world_size: int, heard: list[bytes], until: float) -> None:
    """Take from the loopback interface the hellos of the ranks, where this user may."""
    try:
        tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    except OSError:
        return
    with tap:
        tap.bind(("lo", 0))
        tap.settimeout(0.5)
        while len(heard) < world_size and time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                packet = tap.recv(65536)
                at = packet.find(b"FSC1")
                if at >= 0 and b'"t":"hello"' in packet and packet[at:] not in heard:
                    heard.append(packet[at:])


def role_of(port: int, store_port: int) -> str:
    """Whose a port is: farspan's hub speaks first, the store's is known, what remains is gloo's."""
    if port == store_port:
        return "store"
    with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection, contextlib.suppress(TimeoutError):
        return "hub" if connection.recv(4) == b"FSC1" else "gloo"
    return "gloo"


def main() -> None:
    words = json.loads(sys.argv[1])
    heard: list[bytes] = []
    listening = threading.Thread(target=overhear, args=(words["world_size"], heard, time.monotonic() + 60), daemon=True)
    listening.start()
    print("ready", flush=True)
    pids = json.loads(sys.stdin.readline())  # when the training has begun
    roles = {port: role_of(port, words["store_port"]) for port in listening_ports(pids)}
    ports = sorted(port for port, role in roles.items() if role == words["target"])
    outsider = Outsider(words["target"], words["world_size"], ports, heard, words["seed"])
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    while ports and not over.is_set():
        outsider.attack_once()
    report = {
        "roles": {str(port): role for port, role in roles.items()},
        "sent": outsider.sent,
        "welcomes": outsider.num_welcomes,
        "refused": outsider.refused,
        "overheard": len(heard),
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
