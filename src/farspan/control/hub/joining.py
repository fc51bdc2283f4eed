"""Connects a rank to a service of another one (the hub, a relay, its tensors); both ends prove that they belong to this
run.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

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
    from collections.abc import Callable, Collection

    from farspan.control.wire import Header

__all__ = ["SIDE", "Service", "Client", "join", "admit", "refusal_of"]


class Service(NamedTuple):
    """A service that a rank offers to others.

    Attributes:
        client, server: As what the two ends prove who they are: what is overheard at one is of no use at another.
        name: For people.
    """

    client: str
    server: str
    name: str


_HELLO_SCRATCH_BYTES = 2 * MAX_HELLO_BYTES
SIDE = Service("rank", "hub", "side channel")


class Client(NamedTuple):
    """A rank that connects to a service.

    Attributes:
        rank, world_size: Which rank of how many.
        secret: Of the run.
        host: The rank that serves.
        service: What it serves.
    """

    rank: int
    world_size: int
    secret: str
    host: int
    service: Service = SIDE


def join(
    client: Client,
    address: tuple[str, int],
    deadline_s: float,
    on_open: Callable[[socket.socket], None] = lambda sock: None,
) -> tuple[socket.socket, FrameReader]:
    """Connects to a service.

    Args:
        client: Who connects to whom.
        address: Where.
        deadline_s: How long it may take.
        on_open: Called with the socket before it connects: who shuts that down ends the wait.

    Returns:
        A blocking socket, and its reader, which may have read more already.

    Raises:
        LaunchError: Nobody listens there, or not this run's rank, or it refused (rank taken, other world size).
        DeadlineError: No answer in time.
    """
    until = time.monotonic() + deadline_s
    rank, host, name = client.rank, client.host, client.service.name
    place = f"{address[0]}:{address[1]}"
    hint = f"is rank {host} alive, and can this host reach {place} (firewall, wrong network interface)?"
    what, why = f"rank {rank} cannot reach rank {host}'s {name}", f"{place}: "
    reader = _reader_of_hellos()
    with contextlib.ExitStack() as closing:
        try:
            sock = adopt(socket.socket(socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]))
            closing.callback(sock.close)
            on_open(sock)
            _limit(sock, until)
            sock.connect(address)
            why = f"{place} closed the connection during the hello: "
            _greet(sock, reader, until, client)
        except TimeoutError:
            raise DeadlineError(
                f"rank {rank} waited {deadline_s:g} s for rank {host} to answer its hello",
                why=f"rank {host}'s {name} at {place} said nothing",
                hint=hint,
            ) from None
        except (EOFError, OSError, ProtocolError) as error:
            raise LaunchError(what, why=f"{why}{error}", hint=hint) from None
        closing.pop_all()
    _lift_limits(sock, reader)
    return sock, reader


def _greet(sock: socket.socket, reader: FrameReader, until: float, client: Client) -> None:
    """The client's part of the proof (`wire.py`)."""
    rank, world_size, secret, host, service = client
    theirs, mine = str(_hear(sock, reader, until).get("nonce")), nonce()
    who = {"protocol": PROTOCOL, "rank": rank, "world_size": world_size}
    said = (theirs, mine, rank, world_size)
    send_all(sock, encode({"t": "hello", **who, "nonce": mine, "proof": proof(secret, service.client, *said)}))
    answer = _hear(sock, reader, until)
    if answer.get("t") != "welcome":
        raise LaunchError(
            f"rank {host} refused rank {rank}'s way to its {service.name}",
            why=str(answer.get("why", answer)),
            hint="is a process of an earlier run still alive, or are two runs using the same port?",
        )
    if not is_proof(answer.get("proof"), secret, service.server, *said):
        raise LaunchError(
            f"rank {rank} found a stranger where rank {host}'s {service.name} should be",
            why="it does not know the secret of this run.",
            hint="is a process of another run, or of another user, listening there?",
        )


def admit(sock: socket.socket, host: int, world_size: int, secret: str, service: Service) -> tuple[int, FrameReader]:
    """Returns the other end of `join`, for a service that every rank may use: who has come, and the reader of its
    connection.

    Raises:
        ProtocolError: A stranger, which has got a refusal.
        EOFError, OSError: The connection has ended.
    """
    mine, reader = nonce(), _reader_of_hellos()
    send_all(sock, encode({"t": "challenge", "nonce": mine}))
    hello = _hear(sock, reader, math.inf)
    refusal = refusal_of(hello, mine, secret, host, world_size, range(world_size), service)
    if refusal:
        send_all(sock, encode({"t": "refused", "why": refusal}))
        raise ProtocolError(refusal)
    rank: int = hello["rank"]
    proven = proof(secret, service.server, mine, hello["nonce"], rank, world_size)
    send_all(sock, encode({"t": "welcome", "proof": proven}))
    _lift_limits(sock, reader)
    return rank, reader


def refusal_of(
    hello: Header,
    challenge: str,
    secret: str,
    host: int,
    world_size: int,
    clients: Collection[int],
    service: Service = SIDE,
) -> str:
    """Returns why the sender of `hello` may not come in; "" if it may.

    Args:
        hello: Anything a stranger may say.
        challenge: The random number that it was sent.
        secret: Of the run.
        host: The rank that serves.
        world_size: Of how many ranks.
        clients: The ranks that may come.
        service: What it serves.
    """
    said = (service.client, challenge, hello.get("nonce"), hello.get("rank"), hello.get("world_size"))
    if hello.get("t") != "hello" or not is_proof(hello.get("proof"), secret, *said):
        return "it does not belong to this run (it does not know its secret)"
    if hello.get("protocol") != PROTOCOL:
        return f"another version of farspan: protocol {hello.get('protocol')}, not {PROTOCOL} as on rank {host}"
    rank = hello.get("rank")
    if hello.get("world_size") != world_size:
        return f"it expects {hello.get('world_size')} ranks, rank {host} expects {world_size}"
    if not isinstance(rank, int) or not 0 <= rank < world_size:
        return f"there is no rank {rank} among {world_size}"
    return "" if rank in clients else f"rank {rank} has no place below rank {host}"


def _reader_of_hellos() -> FrameReader:
    reader = FrameReader(max_header=MAX_HELLO_BYTES, max_payload=0, scratch_bytes=_HELLO_SCRATCH_BYTES)
    reader.max_frames = 1
    return reader


def _lift_limits(sock: socket.socket, reader: FrameReader) -> None:
    """The other end has proven who it is."""
    reader.max_header, reader.max_payload, reader.max_frames = MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, None
    sock.settimeout(None)


def _hear(sock: socket.socket, reader: FrameReader, until: float) -> Header:
    while True:
        _limit(sock, until)
        for frame in reader.read(sock):
            return frame.header


def _limit(sock: socket.socket, until: float) -> None:
    sock.settimeout(max(0.001, min(until - time.monotonic(), threading.TIMEOUT_MAX)))
