"""The hub's sockets: one thread in rank 0's process that moves the hub's messages and never blocks on a rank."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import selectors
import socket
import threading
import time
from collections import deque
from typing import Any

from farspan.control.hub.state import Hub, Message
from farspan.control.wire import (
    LINK_DEAD_S,
    LOOK_S,
    MAX_HEADER_BYTES,
    MAX_HELLO_BYTES,
    MAX_PAYLOAD_BYTES,
    PROTOCOL,
    Buffer,
    Frame,
    FrameReader,
    Header,
    ProtocolError,
    adopt,
    encode,
    is_of_link,
    is_proof,
    is_resending,
    nonce,
    proof,
)

__all__ = ["HubServer"]

_log = logging.getLogger(__name__)

_MAX_STRANGERS = 128
"""Connections that have not said hello yet; the oldest goes when one more comes."""
_MAX_WARNINGS = 10
"""Lines about strangers."""
_FLUSH_S = 5.0
"""At the end of the hub: how long a rank may take to accept what is still queued for it."""


_BEAT = encode({"t": "beat"})
"""Says nothing, but must be acknowledged."""


class _Connection:
    """One socket: its incoming frames, and a queue of outgoing buffers."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.rank: int | None = None
        self.nonce = nonce()
        self._resending_since = math.inf
        self.reader = FrameReader(max_header=MAX_HELLO_BYTES, max_payload=0)
        self.queue: deque[Buffer] = deque()
        self.events = selectors.EVENT_READ
        self.last_words = False
        """Close as soon as the queue is empty."""
        self.closed = False

    def is_dead(self) -> bool:
        """Whether nothing has got through for long; to be asked now and then."""
        self._resending_since = min(self._resending_since, time.monotonic()) if is_resending(self.sock) else math.inf
        return time.monotonic() - self._resending_since > LINK_DEAD_S

    def flush(self) -> None:
        """Sends as much as the socket takes now."""
        while self.queue:
            try:
                # 16 at a time: system calls limit the number of buffers.
                sent = self.sock.sendmsg(list(itertools.islice(self.queue, 16)))
            except BlockingIOError:
                return
            while sent:
                first = self.queue[0]
                if sent < len(first):
                    self.queue[0] = memoryview(first)[sent:]
                    break
                sent -= len(first)
                self.queue.popleft()


class HubServer:
    """Hosts the hub of one run; made by `SideChannel.host`.

    Attributes:
        address: (host, port) that it listens on; tell it to the other ranks.
    """

    def __init__(self, world_size: int, secret: str, bind_address: str | tuple[str, int]) -> None:
        host, port = (bind_address, 0) if isinstance(bind_address, str) else bind_address
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._listener = adopt(socket.create_server((host, port), family=family, backlog=max(128, world_size)))
        self._listener.setblocking(False)
        name = self._listener.getsockname()
        self.address: tuple[str, int] = (name[0], name[1])
        self._secret = secret
        self._hub = Hub(world_size)
        self._by_rank: dict[int, _Connection] = {}
        self._strangers: dict[_Connection, None] = {}
        # For ranks that have not connected yet.
        self._kept: dict[int, list[Buffer]] = {}
        self._outbox: deque[Message] = deque()
        self._num_warnings = 0
        """Lines about strangers so far."""
        self._stopping = False
        self._stopped = False
        self._look_at = 0.0
        self._ends = threading.Condition()
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="farspan-side-hub", daemon=True)
        self._thread.start()

    def wait_ended(self, linger_s: float) -> bool:
        """Waits until every rank but rank 0 has said bye or died; False where `linger_s` ran out."""
        others = set(range(1, self._hub.world_size))
        with self._ends:
            return self._ends.wait_for(
                lambda: others <= self._hub.ended | self._hub.died or self._stopped,
                min(linger_s, threading.TIMEOUT_MAX),
            )

    def stop(self) -> None:
        """Ends the hub: what is queued goes out, ranks that still run get a failure. Idempotent."""
        self._stopping = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # Full: it is awake already. Closed: it has ended.
            self._wake_sender.send(b"!")

    # -- all below runs in the hub's thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn(LOOK_S)
            self._outbox.extend(self._hub.on_shutdown())
            self._deliver()
            until = time.monotonic() + _FLUSH_S
            while any(conn.queue for conn in self._by_rank.values()) and (left := until - time.monotonic()) > 0:
                self._turn(left)
        except Exception:
            _log.exception("the side channel's hub has failed; every rank will see rank 0 as dead")
        finally:
            for conn in [*self._by_rank.values(), *self._strangers]:
                conn.sock.close()
            for sock in (self._listener, self._wake_sender, self._wake_receiver):
                sock.close()
            self._selector.close()
            with self._ends:
                self._stopped = True
                self._ends.notify_all()

    def _turn(self, timeout_s: float) -> None:
        for key, events in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_receiver:
                self._wake_receiver.recv(4096)
            else:
                conn: _Connection = key.data
                if events & selectors.EVENT_WRITE and not conn.closed:
                    self._flush(conn)
                if events & selectors.EVENT_READ and not conn.closed:
                    self._receive(conn)
            self._deliver()
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_S
            self._look_at_links()

    def _look_at_links(self) -> None:
        dead = [conn for conn in self._by_rank.values() if conn.is_dead()]
        for conn in dead:
            assert conn.rank is not None
            self._outbox.extend(self._hub.on_silent(conn.rank))
        self._deliver()
        for conn in dead:
            self._drop(conn)
        for conn in self._by_rank.values():
            if not conn.queue:
                conn.queue.extend(_BEAT)
                self._flush(conn)
        self._deliver()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            _log.debug("accept: %s", error)
            return
        adopt(sock).setblocking(False)
        conn = _Connection(sock)
        self._selector.register(sock, selectors.EVENT_READ, conn)
        self._strangers[conn] = None
        conn.queue.extend(encode({"t": "challenge", "nonce": conn.nonce}))
        self._flush(conn)
        if len(self._strangers) > _MAX_STRANGERS:
            self._drop(next(iter(self._strangers)))

    def _receive(self, conn: _Connection) -> None:
        try:
            frames = conn.reader.read(conn.sock)
        except BlockingIOError:
            return
        except (EOFError, OSError) as error:
            self._lose(conn, error)
            return
        except ProtocolError as error:
            self._warn(conn, "sent nonsense: %s", error)
            self._drop(conn)
            return
        for frame in frames:
            if conn.closed:
                return
            if conn.rank is None:
                self._greet(conn, frame.header)
            else:
                self._hear(conn, conn.rank, frame)

    def _hear(self, conn: _Connection, rank: int, frame: Frame) -> None:
        try:
            self._outbox.extend(self._hub.on_message(rank, frame.header, frame.payload))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
            _log.warning("side channel: rank %d sent %r: %r", rank, frame.header.get("t"), error)
            self._drop(conn)
            return
        if frame.header.get("t") == "bye":
            with self._ends:
                self._ends.notify_all()

    def _greet(self, conn: _Connection, hello: Header) -> None:
        del self._strangers[conn]
        refusal = self._refusal(conn, hello)
        if refusal:
            self._warn(conn, "was refused: %s", refusal)
            conn.queue.extend(encode({"t": "refused", "why": refusal}))
            conn.last_words = True
            self._flush(conn)
            return
        rank: int = hello["rank"]
        conn.rank = rank
        conn.reader.max_header, conn.reader.max_payload = MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES
        self._by_rank[rank] = conn
        proven = proof(self._secret, "hub", conn.nonce, hello["nonce"], rank, hello["world_size"])
        conn.queue.extend(encode({"t": "welcome", "proof": proven}))
        conn.queue.extend(self._kept.pop(rank, ()))
        self._outbox.extend(self._hub.on_joined(rank))
        self._flush(conn)

    def _refusal(self, conn: _Connection, hello: dict[str, Any]) -> str:
        """Why this connection may not take part; "" if it may."""
        said = ("rank", conn.nonce, hello.get("nonce"), hello.get("rank"), hello.get("world_size"))
        if hello.get("t") != "hello" or not is_proof(hello.get("proof"), self._secret, *said):
            return "it does not belong to this run (it does not know its secret)"
        if hello.get("protocol") != PROTOCOL:
            return f"another version of farspan: protocol {hello.get('protocol')} here, {PROTOCOL} on rank 0"
        rank, world_size = hello.get("rank"), hello.get("world_size")
        if world_size != self._hub.world_size:
            return f"it expects {world_size} ranks, rank 0 expects {self._hub.world_size}"
        if not isinstance(rank, int) or not 0 <= rank < self._hub.world_size:
            return f"there is no rank {rank} among {world_size}"
        if rank in self._hub.joined:
            return f"rank {rank} has connected before"
        return ""

    def _deliver(self) -> None:
        while self._outbox:
            message = self._outbox.popleft()
            buffers = encode(message.header, message.payload)
            for rank in message.to:
                conn = self._by_rank.get(rank)
                if conn is not None:
                    conn.queue.extend(buffers)
                    self._flush(conn)
                elif rank not in self._hub.joined:
                    self._kept.setdefault(rank, []).extend(buffers)

    def _flush(self, conn: _Connection) -> None:
        try:
            conn.flush()
        except OSError as error:
            self._lose(conn, error)
            return
        if conn.last_words and not conn.queue:
            self._drop(conn)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if conn.queue else 0)
        if events != conn.events:
            conn.events = events
            self._selector.modify(conn.sock, events, conn)

    def _lose(self, conn: _Connection, error: BaseException) -> None:
        if conn.rank is not None and is_of_link(error):
            self._outbox.extend(self._hub.on_silent(conn.rank))
        self._drop(conn)

    def _drop(self, conn: _Connection) -> None:
        if conn.closed:
            return
        conn.closed = True
        self._strangers.pop(conn, None)
        self._selector.unregister(conn.sock)
        conn.sock.close()
        conn.queue.clear()
        if conn.rank is not None:
            del self._by_rank[conn.rank]
            self._outbox.extend(self._hub.on_gone(conn.rank))
            with self._ends:
                self._ends.notify_all()

    def _warn(self, conn: _Connection, text: str, what: object) -> None:
        """Say what a connection did; of strangers, who may be many, only the first few times."""
        if conn.rank is not None:
            _log.warning("side channel: rank %d %s", conn.rank, text % what)
            return
        self._num_warnings += 1
        if self._num_warnings <= _MAX_WARNINGS:
            last = "; no more is said of strangers" if self._num_warnings == _MAX_WARNINGS else ""
            _log.warning("side channel: a stranger %s%s", text % what, last)
