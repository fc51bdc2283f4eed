"""Both ends of a connection prove that they know the secret of the run, which is never sent.

nonce (16 bytes) each way, proof (32 bytes) each way
"""

from __future__ import annotations

import hmac
import secrets
import socket

from farspan.launch.tcp.exact import receive_exactly

__all__ = ["prove"]

_NONCE_BYTES, _PROOF_BYTES = 16, 32


def prove(link: socket.socket, secret: bytes, own: bytes, other: bytes) -> None:
    """Proves to the other end that this one knows a secret, and that the other one does.

    Args:
        link: A connection; its timeout counts for each step.
        secret: Of the run.
        own: As what this end proves it: what is overheard at one service is of no use at another.
        other: As what the other end proves it.

    Raises:
        ConnectionError: The other end does not know it.
    """
    mine = secrets.token_bytes(_NONCE_BYTES)
    link.sendall(mine)
    theirs = receive_exactly(link, _NONCE_BYTES)
    link.sendall(_proof(secret, own, mine, theirs))
    found = receive_exactly(link, _PROOF_BYTES)
    if not hmac.compare_digest(found, _proof(secret, other, theirs, mine)):
        raise ConnectionError("it does not know the secret of the run")


def _proof(secret: bytes, role: bytes, own: bytes, other: bytes) -> bytes:
    return hmac.new(secret, role + own + other, "sha256").digest()
