"""What goes over a connection with a keeper: both ends prove that they know the secret; then requests and answers.

nonce (16 bytes) each way, proof (32 bytes) each way
request    length (4 bytes), JSON {"do": "put", "path": ..., "size": ...}, so many bytes of data
answer     length (4 bytes), JSON {"size": ...} or {"error": ...}, so many bytes of data
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from typing import Any, cast

__all__ = ["CHUNK_BYTES", "Message", "prove", "receive", "receive_into", "send"]

Message = dict[str, Any]
CHUNK_BYTES = 1 << 20
_NONCE_BYTES = 16
_MOST_BYTES = 1 << 20


def prove(link: socket.socket, secret: bytes, *, is_keeper: bool) -> None:
    """Proves to the other end that this one knows a secret, which is never sent.

    Raises:
        ConnectionError: The other end does not know it.
    """
    mine = secrets.token_bytes(_NONCE_BYTES)
    link.sendall(mine)
    theirs = _exactly(link, _NONCE_BYTES)
    link.sendall(_proof(secret, mine, theirs, is_keeper=is_keeper))
    found = _exactly(link, 32)
    if not hmac.compare_digest(found, _proof(secret, theirs, mine, is_keeper=not is_keeper)):
        raise ConnectionError("it does not know the secret of the run")


def send(link: socket.socket, message: Message) -> None:
    """Sends a message; the data that it announces come after it."""
    text = json.dumps(message).encode()
    link.sendall(len(text).to_bytes(4, "big") + text)


def receive(link: socket.socket) -> Message:
    """Returns the next message.

    Raises:
        ConnectionError: The other end has closed, or says what is no message.
    """
    length = int.from_bytes(_exactly(link, 4), "big")
    if length > _MOST_BYTES:
        raise ConnectionError("it sends what is no message")
    try:
        found = json.loads(_exactly(link, length))
    except (ValueError, RecursionError):
        raise ConnectionError("it sends what is no message") from None
    if not isinstance(found, dict):
        raise ConnectionError("it sends what is no message")
    return cast("Message", found)


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


def _exactly(link: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    receive_into(link, memoryview(data))
    return bytes(data)


def _proof(secret: bytes, own: bytes, other: bytes, *, is_keeper: bool) -> bytes:
    role = b"keeper" if is_keeper else b"rank"
    return hmac.new(secret, role + own + other, "sha256").digest()
