"""How a rank reaches the hub: over a socket with a listener thread, or, in a world of one, by a plain call."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Protocol

from farspan.control.hub.state import Hub
from farspan.control.text import describe_death, describe_lost_link
from farspan.control.wire import (
    LINK_SILENT_S,
    LOOK_S,
    MAX_HEADER_BYTES,
    MAX_HELLO_BYTES,
    MAX_PAYLOAD_BYTES,
    PROTOCOL,
    Frame,
    FrameReader,
    ProtocolError,
    adopt,
    encode,
    is_of_link,
    is_proof,
    nonce,
    proof,
    send_all,
    silence_s,
)
from farspan.errors import DeadlineError, LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from farspan.control.wire import Buffer, Header

__all__ = ["Link", "LoopLink", "SocketLink", "connect", "limit_sends"]

_log = logging.getLogger(__name__)

_SPARE_BYTES = 256
_LONGEST_S = 1e6


class Link(Protocol):
    """One rank's connection to the hub."""

    def listen(
        self,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[Header], None],
        place: Callable[[Header, int], bytearray | memoryview],
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        """From now on every frame goes to `on_frame`, and the failure that its end means to `on_end`. `on_turn` is
        called in between, at least once in about LOOK_S.
        """
        ...

    def send(self, header: Header, payload: Buffer = b"") -> None:
        """Sends a frame; from any thread. Where the connection is gone, `on_end` tells, not this."""
        ...

    def is_listener(self) -> bool:
        """Whether the calling thread is the one that calls `on_frame`."""
        ...

    def finish(self) -> None:
        """Nothing more will be sent."""
        ...


class LoopLink:
    """World size 1: the hub is called directly; no socket, no thread."""

    def __init__(self) -> None:
        self._hub = Hub(1)
        self._hub.on_joined(0)
        self._lock = threading.RLock()
        self._on_frame: Callable[[Frame], None] = lambda frame: None

    def listen(
        self,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[Header], None],
        place: Callable[[Header, int], bytearray | memoryview],
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_frame = on_frame

    def send(self, header: Header, payload: Buffer = b"") -> None:
        with self._lock:
            for message in self._hub.on_message(0, header, payload):
                if 0 in message.to:
                    self._on_frame(Frame(message.header, message.payload))

    def is_listener(self) -> bool:
        return True

    def finish(self) -> None:
        pass


class SocketLink:
    """A blocking socket: one thread reads, any thread writes under a lock."""

    def __init__(self, sock: socket.socket, reader: FrameReader, frames: list[Frame], name: str) -> None:
        self._sock = sock
        self._reader = reader
        self._frames = frames
        self._send_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def listen(
        self,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[Header], None],
        place: Callable[[Header, int], bytearray | memoryview],
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_frame, self._on_end, self._on_turn = on_frame, on_end, on_turn
        self._reader.place = place
        self._thread.start()

    def send(self, header: Header, payload: Buffer = b"") -> None:
        buffers = encode(header, payload, spare_bytes=_SPARE_BYTES)
        try:
            with self._send_lock:
                send_all(self._sock, buffers)
        except BlockingIOError:
            # The hub has not read for a whole deadline, and half a frame is on its way: the connection is of no use.
            _log.warning("side channel: rank 0 has accepted nothing in time: it is stopped or unreachable")
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            _log.debug("side channel: sending %r: %s", header.get("t"), error)

    def is_listener(self) -> bool:
        return threading.current_thread() is self._thread

    def finish(self) -> None:
        # Half of it: closing with unread data in the buffer would reset the connection, and lose the goodbye.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def _run(self) -> None:
        end = describe_death(0)
        try:
            frames, self._frames = self._frames, []
            while True:
                for frame in frames:
                    self._on_frame(frame)
                # Nothing may keep the last payload alive, or viewed, while we wait for the next one.
                frame = frames = None
                self._on_turn()
                try:
                    frames = self._reader.read(self._sock)
                except BlockingIOError:  # nothing has come for LOOK_S
                    frames = []
                    if silence_s(self._sock) > LINK_SILENT_S:
                        raise
        except BlockingIOError:
            end = describe_lost_link(0)
            self.send({"t": "fail", **end})  # the other way may still be open
        except (EOFError, OSError) as error:
            end = describe_lost_link(0) if is_of_link(error) else end
        except ProtocolError as error:
            _log.warning("side channel: the hub sent nonsense: %s", error)
        except Exception:
            _log.exception("the side channel's listener has failed")
        finally:
            self._sock.close()
            self._on_end(end)


def connect(rank: int, world_size: int, address: tuple[str, int], secret: str, deadline_s: float) -> SocketLink:
    """Connects, and proves to each other that both ends belong to this run.

    Raises:
        LaunchError: Nobody listens there, or not this run's hub, or it refused (rank taken, other world size).
        DeadlineError: No answer in time.
    """
    until = time.monotonic() + deadline_s
    place = f"{address[0]}:{address[1]}"
    hint = f"is rank 0 alive, and can this host reach {place} (firewall, wrong network interface)?"
    try:
        sock = adopt(socket.create_connection(address, timeout=min(deadline_s, threading.TIMEOUT_MAX)))
    except TimeoutError:
        raise _late(rank, place, deadline_s, hint) from None
    except OSError as error:
        what = f"rank {rank} cannot reach rank 0's side channel"
        raise LaunchError(what, why=f"{place}: {error}", hint=hint) from None
    reader = FrameReader(max_header=MAX_HELLO_BYTES, max_payload=0)
    reader.max_frames = 1
    try:
        _greet(sock, reader, until, secret, rank, world_size)
    except TimeoutError:
        sock.close()
        raise _late(rank, place, deadline_s, hint) from None
    except (EOFError, OSError, ProtocolError) as error:
        sock.close()
        why = f"{place} closed the connection during the hello ({error})"
        raise LaunchError(f"rank {rank} cannot reach rank 0's side channel", why=why, hint=hint) from None
    except BaseException:
        sock.close()
        raise
    reader.max_header, reader.max_payload, reader.max_frames = MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, None
    sock.settimeout(None)
    limit_sends(sock, deadline_s)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _seconds(LOOK_S))
    return SocketLink(sock, reader, reader.take(), f"farspan-side-{rank}")


def _greet(sock: socket.socket, reader: FrameReader, until: float, secret: str, rank: int, world_size: int) -> None:
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
            f"rank 0 refused rank {rank}'s side channel",
            why=str(answer.get("why", answer)),
            hint="is a process of an earlier run still alive, or are two runs using the same port?",
        )
    if not is_proof(answer.get("proof"), secret, "hub", *said):
        raise LaunchError(
            f"rank {rank} found a stranger where rank 0's side channel should be",
            why="it does not know the secret of this run.",
            hint="is a process of another run, or of another user, listening there?",
        )


def limit_sends(sock: socket.socket, deadline_s: float) -> None:
    """Let a send on a blocking socket fail when its peer has accepted nothing for so long."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _seconds(deadline_s))


def _seconds(duration_s: float) -> bytes:
    """A duration as socket options take it; 0 would be none."""
    whole_s = int(min(duration_s, _LONGEST_S))
    rest_us = int((min(duration_s, _LONGEST_S) - whole_s) * 1e6)
    return struct.pack("@ll", whole_s, max(rest_us, 1))


def _late(rank: int, place: str, deadline_s: float, hint: str) -> DeadlineError:
    return DeadlineError(
        f"rank {rank} waited {deadline_s:g} s for rank 0 to answer its hello",
        why=f"rank 0's side channel at {place} said nothing",
        hint=hint,
    )
