"""How a rank comes to the hub, or to the relay of another rank: both ends prove that they belong to this run."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

from farspan.control.wire import (
    MAX_HEADER_BYTES,
    MAX_HELLO_BYTES,
    MAX_PAYLOAD_BYTES,
    PROTOCOL,
    FrameReader,
    ProtocolError,
    adopt,
    encode,
    is_proof,
    nonce,
    proof,
    send_all,
)
from farspan.errors import DeadlineError, LaunchError

if TYPE_CHECKING:
    from collections.abc import Collection

    from farspan.control.tree.message import Node
    from farspan.control.wire import Header

__all__ = ["join", "refusal_of"]


def join(
    rank: int, world_size: int, host: int, address: tuple[str, int], secret: str, deadline_s: float
) -> tuple[socket.socket, FrameReader]:
    """Connects to what `host` has at that address, as `rank`.

    Returns:
        A blocking socket, and its reader, which may have read more already.

    Raises:
        LaunchError: Nobody listens there, or not this run's rank, or it refused (rank taken, other world size).
        DeadlineError: No answer in time.
    """
    until = time.monotonic() + deadline_s
    place = f"{address[0]}:{address[1]}"
    hint = f"is rank {host} alive, and can this host reach {place} (firewall, wrong network interface)?"
    late = DeadlineError(
        f"rank {rank} waited {deadline_s:g} s for rank {host} to answer its hello",
        why=f"rank {host}'s side channel at {place} said nothing",
        hint=hint,
    )
    try:
        sock = adopt(socket.create_connection(address, timeout=min(deadline_s, threading.TIMEOUT_MAX)))
    except TimeoutError:
        raise late from None
    except OSError as error:
        what = f"rank {rank} cannot reach rank {host}'s side channel"
        raise LaunchError(what, why=f"{place}: {error}", hint=hint) from None
    reader = FrameReader(max_header=MAX_HELLO_BYTES, max_payload=0)
    reader.max_frames = 1
    try:
        _greet(sock, reader, until, secret, rank, world_size, host)
    except TimeoutError:
        sock.close()
        raise late from None
    except (EOFError, OSError, ProtocolError) as error:
        sock.close()
        why = f"{place} closed the connection during the hello ({error})"
        raise LaunchError(f"rank {rank} cannot reach rank {host}'s side channel", why=why, hint=hint) from None
    except BaseException:
        sock.close()
        raise
    reader.max_header, reader.max_payload, reader.max_frames = MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, None
    sock.settimeout(None)
    return sock, reader


def _greet(
    sock: socket.socket, reader: FrameReader, until: float, secret: str, rank: int, world_size: int, host: int
) -> None:
    """The rank's part of the proof (`wire.py`)."""

    def hear() -> Header:
        while True:
            sock.settimeout(max(0.001, min(until - time.monotonic(), threading.TIMEOUT_MAX)))
            for frame in reader.read(sock):
                return frame.header

    theirs, mine = str(hear().get("nonce")), nonce()
    who = {"protocol": PROTOCOL, "rank": rank, "world_size": world_size}
    said = (theirs, mine, rank, world_size)
    send_all(sock, encode({"t": "hello", **who, "nonce": mine, "proof": proof(secret, "rank", *said)}))
    answer = hear()
    if answer.get("t") != "welcome":
        raise LaunchError(
            f"rank {host} refused rank {rank}'s side channel",
            why=str(answer.get("why", answer)),
            hint="is a process of an earlier run still alive, or are two runs using the same port?",
        )
    if not is_proof(answer.get("proof"), secret, "hub", *said):
        raise LaunchError(
            f"rank {rank} found a stranger where rank {host}'s side channel should be",
            why="it does not know the secret of this run.",
            hint="is a process of another run, or of another user, listening there?",
        )


def refusal_of(hello: Header, challenge: str, secret: str, node: Node, clients: Collection[int]) -> str:
    """Why what has said `hello` may not connect to the node; "" if it may.

    Args:
        hello: Anything a stranger may say.
        challenge: The random number that it was told.
        secret: Of the run.
        node: The hub, or a relay.
        clients: The ranks that connect to that one.
    """
    said = ("rank", challenge, hello.get("nonce"), hello.get("rank"), hello.get("world_size"))
    if hello.get("t") != "hello" or not is_proof(hello.get("proof"), secret, *said):
        return "it does not belong to this run (it does not know its secret)"
    if hello.get("protocol") != PROTOCOL:
        return f"another version of farspan: protocol {hello.get('protocol')}, not {PROTOCOL} as on rank {node.rank}"
    rank, world_size = hello.get("rank"), hello.get("world_size")
    if world_size != node.world_size:
        return f"it expects {world_size} ranks, rank {node.rank} expects {node.world_size}"
    if not isinstance(rank, int) or not 0 <= rank < node.world_size:
        return f"there is no rank {rank} among {world_size}"
    if rank not in clients:
        return f"rank {rank} has no place below rank {node.rank}"
    if rank in node.joined:
        return f"rank {rank} has connected before"
    return ""
