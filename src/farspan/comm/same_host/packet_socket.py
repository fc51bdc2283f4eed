"""Sockets between two ranks of one host that never make their sender wait: what they do not take is queued."""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
from collections import deque
from collections.abc import Sequence
from typing import Protocol

__all__ = ["Ending", "Lane", "Packet", "shut_down"]

_SEND_BUFFER_BYTES = 4 << 20  # the system grants what it allows


class Ending(Protocol):
    """A transfer, as far as a lane knows it."""

    def end(self) -> None: ...


class Packet:
    """The memory of one packet, and where its content lies."""

    def __init__(self, header_bytes: int, content_bytes: int) -> None:
        self.memory = bytearray(header_bytes + content_bytes)
        self.view = memoryview(self.memory)
        self.content_address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory, header_bytes))


class Lane:
    """One of the two sockets of a connection, and the packets that it has not taken yet."""

    def __init__(self, sock: socket.socket, epoll: select.epoll) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self.sock = sock
        self.epoll = epoll
        self.queue: deque[tuple[bytes | memoryview, Ending | None]] = deque()
        epoll.register(sock.fileno(), select.EPOLLIN)

    def send(self, packet: bytes | memoryview, transfer: Ending | None = None) -> bool:
        """Send, or queue; `transfer` is over when the socket has taken the packet. False if the peer has closed."""
        if self.queue:
            self.queue.append((bytes(packet), transfer))
            return True
        self.queue.append((packet, transfer))
        is_open = self.flush()
        if self.queue:
            self.queue[0] = (bytes(packet), transfer)
            self.epoll.modify(self.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
        return is_open

    def flush(self) -> bool:
        """Send what is queued as far as the socket takes it. False if the peer has closed."""
        while self.queue:
            packet, transfer = self.queue[0]
            try:
                self.sock.send(packet, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            self.queue.popleft()
            if transfer is not None:
                transfer.end()
        return True


def shut_down(sockets: Sequence[socket.socket]) -> None:
    for sock in sockets:
        with contextlib.suppress(OSError):  # not connected any more, which is as wanted
            sock.shutdown(socket.SHUT_RDWR)
