"""Both ends of a connection prove that they know FARSPAN_SECRET; it is never sent."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket

from farspan.launch.hosts.connection import Connection, LostError

__all__ = ["prove"]


def prove(link: socket.socket, role: str, *, silence_s: float) -> Connection:
    """Returns the connection, once both ends have proved that they know FARSPAN_SECRET.

    Raises:
        LostError: The other end does not know it.
    """
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def hang_up() -> None:
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)

    connection = Connection(link.fileno(), link.fileno(), silence_s=silence_s, hang_up=hang_up, owner=link)
    secret = os.environ.get("FARSPAN_SECRET", "").encode()
    other = "agent" if role == "launcher" else "launcher"
    mine = secrets.token_hex(16)
    try:
        connection.send({"nonce": mine})
        theirs = str(connection.receive().get("nonce", ""))
        connection.send({"proof": _proof(secret, role, mine, theirs)})
        proof = str(connection.receive().get("proof", ""))
        if not hmac.compare_digest(proof.encode(errors="replace"), _proof(secret, other, theirs, mine).encode()):
            raise LostError("it does not know FARSPAN_SECRET")
    except LostError:
        connection.close()
        raise
    return connection


def _proof(secret: bytes, role: str, own: str, other: str) -> str:
    return hmac.new(secret, f"{role} {own} {other}".encode(errors="replace"), "sha256").hexdigest()
