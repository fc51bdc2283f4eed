"""What goes over a connection with a keeper: both ends prove that they know the secret; then requests and answers.

request    length (4 bytes), JSON {"do": "put", "path": ..., "size": ...}, so many bytes of data
answer     length (4 bytes), JSON {"size": ...} or {"error": ...}, so many bytes of data
"""

from __future__ import annotations

import json
import socket
from typing import Any, cast

from farspan.launch.tcp.exact import receive_exactly

__all__ = ["CHUNK_BYTES", "KEEPER", "RANK", "Message", "receive", "send"]

Message = dict[str, Any]
CHUNK_BYTES = 1 << 20
KEEPER, RANK = b"keeper", b"rank"
"""As what the two ends prove that they know the secret."""
_MOST_BYTES = 1 << 20


def send(link: socket.socket, message: Message) -> None:
    """Sends a message; the data that it announces come after it."""
    text = json.dumps(message).encode()
    link.sendall(len(text).to_bytes(4, "big") + text)


def receive(link: socket.socket) -> Message:
    """Returns the next message.

    Raises:
        ConnectionError: The other end has closed, or says what is no message.
    """
    length = int.from_bytes(receive_exactly(link, 4), "big")
    if length > _MOST_BYTES:
        raise ConnectionError("it sends what is no message")
    try:
        found = json.loads(receive_exactly(link, length))
    except (ValueError, RecursionError):
        raise ConnectionError("it sends what is no message") from None
    if not isinstance(found, dict):
        raise ConnectionError("it sends what is no message")
    return cast("Message", found)
