"""A TCP connection between two hosts that measures itself.

    host that listens                        host that probes
         <----- token, which the doctor has given both -----
         <----- number of bytes, and as many bytes ---------    0 for a round trip, then more and more
         ------ one byte, when all have come -------------->

Each end gives up at its deadline.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time

from farspan.launch.hosts.connection import Message

__all__ = ["listen", "probe"]

_NUM_TRIPS = 16
_FIRST_BYTES, _MOST_BYTES = 1 << 18, 1 << 24
_ENOUGH_S = 0.05
"""What takes as long shows the bandwidth."""
_TOKEN_S = 1.0
_SIZE = struct.Struct("!I")
_BLOCK_BYTES = 1 << 20


class _Line:
    """A connection all of whose waits end at one time."""

    def __init__(self, link: socket.socket, until: float) -> None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._link = link
        self._until = until
        self._block = memoryview(bytearray(_BLOCK_BYTES))

    def send(self, data: bytes | memoryview) -> None:
        self._link.settimeout(_left(self._until))
        self._link.sendall(data)

    def take(self, num_bytes: int) -> bytes:
        """Returns so many bytes, but at most those of a block; raises EOFError if fewer come."""
        got = 0
        while got < num_bytes:
            start = got % _BLOCK_BYTES
            self._link.settimeout(_left(self._until))
            count = self._link.recv_into(self._block[start:], min(num_bytes - got, _BLOCK_BYTES - start))
            if not count:
                raise EOFError("the connection has been closed")
            got += count
        return bytes(self._block[:num_bytes])


def listen(token: str, limit_s: float) -> int:
    """Listens at a free port for one who knows the token, in a thread; returns the port."""
    listener = _open_listener()
    threading.Thread(target=_serve, args=(listener, token, time.monotonic() + limit_s), daemon=True).start()
    return int(listener.getsockname()[1])


def probe(address: str, port: int, token: str, limit_s: float) -> Message:
    """Connects with a host that listens; returns latency (one way) and bandwidth, or {"error": why there are none}."""
    until = time.monotonic() + limit_s
    try:
        link = socket.create_connection((address, port), timeout=limit_s)
    except OSError as error:
        return {"error": f"no connection: {_text(error, limit_s)}"}
    with link:
        line = _Line(link, until)
        try:
            line.send(token.encode())
            least_s = min(_trip(line, 0) for _ in range(_NUM_TRIPS))
            size, best = _FIRST_BYTES, 0.0
            while True:
                took_s = _trip(line, size)
                best = max(best, size / max(took_s - least_s, 1e-9))
                if took_s >= _ENOUGH_S or size >= _MOST_BYTES:
                    return {"latency_s": least_s / 2, "bytes_per_s": best}
                size *= 2
        except (OSError, EOFError) as error:
            return {"error": f"connected, but then: {_text(error, limit_s)}"}


def _open_listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 is switched off
            return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _serve(listener: socket.socket, token: str, until: float) -> None:
    with listener:
        while (left := until - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                link = listener.accept()[0]
            except OSError:  # nobody has come; who should have come says why
                return
            if _is_known(link, token, until):
                with link, contextlib.suppress(OSError, EOFError):  # the other end says why it has ended
                    _answer(_Line(link, until))
                return
            link.close()


def _is_known(link: socket.socket, token: str, until: float) -> bool:
    """Returns whether who has come has the token; a stranger who says nothing is not waited for."""
    try:
        return _Line(link, min(until, time.monotonic() + _TOKEN_S)).take(len(token)) == token.encode()
    except (OSError, EOFError):
        return False


def _answer(line: _Line) -> None:
    while True:
        size = _SIZE.unpack(line.take(_SIZE.size))[0]
        line.take(size)
        line.send(b".")


def _trip(line: _Line, size: int) -> float:
    data = memoryview(os.urandom(min(size, _BLOCK_BYTES))) if size else b""
    started = time.monotonic()
    line.send(_SIZE.pack(size))
    for first in range(0, size, _BLOCK_BYTES):
        line.send(data[: size - first])
    line.take(1)
    return time.monotonic() - started


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _text(error: OSError | EOFError, limit_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"not done within {limit_s:g} s"
    return getattr(error, "strerror", None) or str(error)
