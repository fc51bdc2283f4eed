"""Receives a number of bytes that both ends know."""

from __future__ import annotations

import socket

__all__ = ["receive_exactly", "receive_into"]


def receive_exactly(link: socket.socket, count: int) -> bytes:
    """Returns the bytes that come next.

    Raises:
        ConnectionError: The other end has closed.
    """
    data = bytearray(count)
    receive_into(link, memoryview(data))
    return bytes(data)


def receive_into(link: socket.socket, view: memoryview) -> None:
    """Fills memory with the data that come next.

    Raises:
        ConnectionError: The other end has closed.
    """
    while view:
        count = link.recv_into(view)
        if count == 0:
            raise ConnectionError("it has closed the connection")
        view = view[count:]
