"""Links a rank to the hub, or to a relay: over a socket with a listener thread; in a world of one, by a plain call."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any, Protocol

from farspan.control.hub.hub_state import Hub
from farspan.control.hub.joining import Client, join
from farspan.control.text import describe_death, describe_lost_link
from farspan.control.wire import (
    LINK_SILENT_S,
    LOOK_S,
    Frame,
    FrameReader,
    ProtocolError,
    encode,
    is_of_link,
    send_all,
    silence_s,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from farspan.control.wire import Buffer, Header

__all__ = ["Link", "LoopLink", "Server", "SocketLink", "Streams", "connect", "limit_sends"]

_log = logging.getLogger(__name__)

_SPARE_BYTES = 256
_LONGEST_S = 1e6


class Streams(Protocol):
    """Opens streams of bytes between ranks that have no addresses; a stream has what we use of a blocking socket."""

    def connect(self, rank: int) -> Any:
        """Opens a stream to a rank."""
        ...

    def serve(self, accept: Callable[[int, Any], None]) -> None:
        """Hands streams that other ranks open to `accept`, with the rank; it must not block."""
        ...


class Link(Protocol):
    """One rank's connection to the hub.

    Attributes:
        address: Of this host, as the hub and so the other ranks can reach it; "" in a world of one.
        streams: Opens streams to other ranks, where these have no addresses; else None.
    """

    @property
    def address(self) -> str: ...

    @property
    def streams(self) -> Streams | None: ...

    def listen(
        self,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[Header], None],
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts to pass every frame to `on_frame`, and the failure that its end means to `on_end`. `on_turn` is called
        in between, at least once in about LOOK_S.
        """
        ...

    def send(self, header: Header, payload: Buffer = b"") -> None:
        """Sends a frame; from any thread. Where the connection is gone, `on_end` tells, not this."""
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """Entered while the program waits for a frame, which may come sooner for it."""
        ...

    def is_listener(self) -> bool:
        """Returns whether the calling thread is the one that calls `on_frame`."""
        ...

    def finish(self) -> None:
        """Ends the sending: nothing more will come."""
        ...


class Server(Protocol):
    """The hub, or a relay, in this process."""

    def wait_ended(self, linger_s: float) -> bool:
        """Waits until every rank below has said bye, died or heard of a failure; False where `linger_s` ran out."""
        ...

    def stop(self) -> None:
        """Ends it: what is queued goes out, ranks that still run get a failure. Idempotent."""
        ...


class LoopLink:
    """World size 1: the hub is called directly; no socket, no thread."""

    address = ""
    streams = None

    def __init__(self) -> None:
        self._hub = Hub(1)
        self._hub.on_joined(0)
        self._lock = threading.RLock()
        self._on_frame: Callable[[Frame], None] = lambda frame: None

    def listen(
        self,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[Header], None],
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_frame = on_frame

    def send(self, header: Header, payload: Buffer = b"") -> None:
        with self._lock:
            for message in self._hub.on_message(0, header, payload):
                if message.to is None or 0 in message.to:
                    self._on_frame(Frame(message.header, message.payload))

    def waiting(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_listener(self) -> bool:
        return True

    def finish(self) -> None:
        pass


class SocketLink:
    """A blocking socket: one thread reads, any thread writes under a lock.

    Args:
        sock: Its other end belongs to the run.
        reader: Its reader.
        frames: What has come over it already.
        name: Of the thread.
        host: The rank at the other end.
    """

    streams = None

    def __init__(self, sock: socket.socket, reader: FrameReader, frames: list[Frame], name: str, host: int = 0) -> None:
        self._host = host
        self._sock = sock
        self._reader = reader
        self._frames = frames
        self._send_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def address(self) -> str:
        return self._sock.getsockname()[0]

    def listen(
        self,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[Header], None],
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_frame, self._on_end, self._on_turn = on_frame, on_end, on_turn
        self._thread.start()

    def send(self, header: Header, payload: Buffer = b"") -> None:
        buffers = encode(header, payload, spare_bytes=_SPARE_BYTES)
        try:
            with self._send_lock:
                send_all(self._sock, buffers)
        except BlockingIOError:
            # The hub has not read for a whole deadline, and half a frame is on its way: the connection is of no use.
            text = "side channel: rank %d has accepted nothing in time: it is stopped or unreachable"
            _log.warning(text, self._host)
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            _log.debug("side channel: sending %r: %s", header.get("t"), error)

    def waiting(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()  # the listener sleeps until it comes

    def is_listener(self) -> bool:
        return threading.current_thread() is self._thread

    def finish(self) -> None:
        # Half of it: closing with unread data in the buffer would reset the connection, and lose the goodbye.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def _run(self) -> None:
        end = describe_death(self._host)
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
            end = describe_lost_link(self._host)
            self.send({"t": "fail", **end})  # the other way may still be open
        except (EOFError, OSError) as error:
            end = describe_lost_link(self._host) if is_of_link(error) else end
        except ProtocolError as error:
            _log.warning("side channel: the hub sent what is not of farspan: %s", error)
        except Exception:
            _log.exception("the side channel's listener has failed")
        finally:
            self._sock.close()
            self._on_end(end)


def connect(
    rank: int, world_size: int, address: tuple[str, int], secret: str, deadline_s: float, *, host: int = 0
) -> SocketLink:
    """Connects a rank to what `host`, rank 0 or one that relays, has at that address (`hub.joining`).

    Raises:
        LaunchError, DeadlineError: As in `join`.
    """
    sock, reader = join(Client(rank, world_size, secret, host), address, deadline_s)
    limit_sends(sock, deadline_s)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _seconds(LOOK_S))
    return SocketLink(sock, reader, reader.take(), f"farspan-side-{rank}", host)


def limit_sends(sock: socket.socket, deadline_s: float) -> None:
    """Let a send on a blocking socket fail when its peer has accepted nothing for so long."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _seconds(deadline_s))


def _seconds(duration_s: float) -> bytes:
    """Returns a duration as socket options take it; 0 would be none."""
    whole_s = int(min(duration_s, _LONGEST_S))
    rest_us = int((min(duration_s, _LONGEST_S) - whole_s) * 1e6)
    return struct.pack("@ll", whole_s, max(rest_us, 1))
