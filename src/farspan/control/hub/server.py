"""The sockets of the hub, or of a relay: one thread that moves the node's messages and never blocks on a rank."""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import socket
import threading
import time
from collections import deque

from farspan.control.hub.connection import Connection
from farspan.control.hub.hub_state import Hub
from farspan.control.hub.joining import Client, join, refusal_of
from farspan.control.text import describe_death, describe_lost_link
from farspan.control.tree.deliveries import PARENT, deliveries
from farspan.control.tree.message import Message, Node
from farspan.control.tree.numbers import children
from farspan.control.tree.numbers import parent as parent_of
from farspan.control.tree.relay import Relay
from farspan.control.wire import (
    LOOK_S,
    MAX_HEADER_BYTES,
    MAX_HELLO_BYTES,
    MAX_PAYLOAD_BYTES,
    Buffer,
    Frame,
    FrameReader,
    Header,
    ProtocolError,
    adopt,
    encode,
    is_of_link,
    proof,
)

__all__ = ["HubServer"]

_log = logging.getLogger(__name__)

_MAX_STRANGERS = 128
"""Connections that have not said hello yet; the oldest goes when one more comes."""
_MAX_WARNINGS = 10
"""Lines about strangers."""
_FLUSH_S = 5.0
"""How long a rank may take, at the end of the hub, to accept what is still queued for it."""


_BEAT = encode({"t": "beat"})
"""Says nothing, but must be acknowledged."""


class HubServer:
    """Hosts the hub of one run, or a relay; made by `SideChannel.host`.

    Attributes:
        address: (host, port) that it listens on; tell it to the ranks that connect here.
    """

    def __init__(
        self,
        node: Node,
        secret: str,
        bind_address: str | tuple[str, int],
        uplink: tuple[socket.socket, FrameReader] | None = None,
    ) -> None:
        self._node = node
        self._clients = [node.rank, *children(node.rank, node.world_size)]
        host, port = (bind_address, 0) if isinstance(bind_address, str) else bind_address
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._listener = adopt(socket.create_server((host, port), family=family, backlog=max(128, node.world_size)))
        self._listener.setblocking(False)
        name = self._listener.getsockname()
        self.address: tuple[str, int] = (name[0], name[1])
        self._secret = secret
        self._by_rank: dict[int, Connection] = {}
        self._strangers: dict[Connection, None] = {}
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
        self._uplink: Connection | None = None
        """The connection to the parent; None in rank 0."""
        if uplink is not None:
            self._uplink = Connection(*uplink)
            self._uplink.sock.setblocking(False)
            self._selector.register(self._uplink.sock, selectors.EVENT_READ, self._uplink)
        self._thread = threading.Thread(target=self._run, name=_name_of(node.rank), daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        world_size: int,
        secret: str,
        bind_address: str | tuple[str, int],
        *,
        rank: int = 0,
        parent: tuple[str, int] | None = None,
        deadline_s: float = math.inf,
    ) -> HubServer:
        """Starts the hub in the process of rank 0, or a relay in that of another rank that has children.

        Tell its `.address` to those who connect here; all know the secret. A relay is told where its `parent` is, and
        raises LaunchError or DeadlineError where that one does not let it come in time.
        """
        if parent is None:
            return cls(Hub(world_size), secret, bind_address)
        uplink = join(Client(rank, world_size, secret, parent_of(rank)), parent, deadline_s)
        return cls(Relay(rank, world_size), secret, bind_address, uplink)

    def wait_ended(self, linger_s: float) -> bool:
        """Waits until every rank below has said bye, died or heard of a failure; False where `linger_s` ran out."""
        others = {*self._node.ranks} - {self._node.rank}
        with self._ends:
            return self._ends.wait_for(
                lambda: others <= self._node.ended | self._node.died | self._node.heard or self._stopped,
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
            until = time.monotonic() + _FLUSH_S
            while self._uplink is not None and self._is_own_end_to_come() and (left := until - time.monotonic()) > 0:
                self._turn(left)
            self._outbox.extend(self._node.on_shutdown())
            self._deliver()
            while any(conn.queue for conn in self._connections()) and (left := until - time.monotonic()) > 0:
                self._turn(left)
            self._say_goodbye(until)
        except Exception:
            _log.exception("the side channel's hub has failed; every rank will see rank %d as dead", self._node.rank)
        finally:
            for conn in [*self._connections(), *self._strangers]:
                conn.sock.close()
            for sock in (self._listener, self._wake_sender, self._wake_receiver):
                sock.close()
            self._selector.close()
            with self._ends:
                self._stopped = True
                self._ends.notify_all()

    def _connections(self) -> list[Connection]:
        return [*self._by_rank.values(), *([self._uplink] if self._uplink is not None else [])]

    def _is_own_end_to_come(self) -> bool:
        """Returns whether this rank's own channel has not said bye yet: what it said last is for the node above too."""
        node = self._node
        return node.rank in node.joined - node.ended - node.died

    def _say_goodbye(self, until: float) -> None:
        """Says goodbye to the parent. Closing with unread data in the buffer would reset the connection."""
        if self._uplink is not None:
            with contextlib.suppress(OSError):
                self._uplink.sock.shutdown(socket.SHUT_WR)
        while self._uplink is not None and (left := until - time.monotonic()) > 0:
            self._turn(left)

    def _turn(self, timeout_s: float) -> None:
        for key, events in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_receiver:
                self._wake_receiver.recv(4096)
            else:
                conn: Connection = key.data
                if events & selectors.EVENT_WRITE and not conn.closed:
                    self._flush(conn)
                if events & selectors.EVENT_READ and not conn.closed:
                    self._receive(conn)
            if self._outbox:
                self._deliver()
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_S
            self._look_at_links()

    def _look_at_links(self) -> None:
        dead = [conn for conn in self._by_rank.values() if conn.is_dead()]
        for conn in dead:
            assert conn.rank is not None
            self._outbox.extend(self._node.on_silent(conn.rank))
        self._deliver()
        for conn in dead:
            self._drop(conn)
        for conn in list(self._by_rank.values()):
            if not conn.queue:
                self._send(conn, _BEAT)
        if self._uplink is not None and self._uplink.is_silent():
            self._lose_parent(is_silent=True)
        self._outbox.extend(self._node.on_tick())
        self._deliver()

    def _lose_parent(self, *, is_silent: bool) -> None:
        uplink, self._uplink = self._uplink, None
        if uplink is None:
            return
        above = parent_of(self._node.rank)
        failure = describe_lost_link(above) if is_silent else describe_death(above)
        if is_silent:  # the other way may still be open
            with contextlib.suppress(OSError):
                uplink.sock.sendmsg(encode({"t": "fail", "from": self._node.rank, **failure}))
        self._selector.unregister(uplink.sock)
        uplink.sock.close()
        uplink.queue.clear()
        self._outbox.extend(self._node.on_parent_lost(failure))

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            _log.debug("accept: %s", error)
            return
        adopt(sock).setblocking(False)
        conn = Connection(sock, FrameReader(max_header=MAX_HELLO_BYTES, max_payload=0))
        self._selector.register(sock, selectors.EVENT_READ, conn)
        self._strangers[conn] = None
        self._send(conn, encode({"t": "challenge", "nonce": conn.nonce}))
        if len(self._strangers) > _MAX_STRANGERS:
            self._drop(next(iter(self._strangers)))

    def _receive(self, conn: Connection) -> None:
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
            if conn is self._uplink:
                self._outbox.extend(self._node.on_parent(frame.header, frame.payload))
            elif conn.rank is None:
                self._greet(conn, frame.header)
            else:
                self._hear(conn, conn.rank, frame)

    def _hear(self, conn: Connection, rank: int, frame: Frame) -> None:
        try:
            self._outbox.extend(self._node.on_message(rank, frame.header, frame.payload))
        except (
            ProtocolError,
            KeyError,
            TypeError,
            ValueError,
            IndexError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            _log.warning("side channel: rank %d sent %r: %r", rank, frame.header.get("t"), error)
            self._drop(conn)
            return
        if frame.header.get("t") in ("bye", "gone", "heard"):
            with self._ends:
                self._ends.notify_all()

    def _greet(self, conn: Connection, hello: Header) -> None:
        del self._strangers[conn]
        node = self._node
        refusal = refusal_of(hello, conn.nonce, self._secret, node.rank, node.world_size, self._clients)
        if not refusal and hello["rank"] in node.joined:
            refusal = f"rank {hello['rank']} has connected before"
        if refusal:
            self._warn(conn, "was refused: %s", refusal)
            conn.last_words = True
            self._send(conn, encode({"t": "refused", "why": refusal}))
            return
        rank: int = hello["rank"]
        conn.rank = rank
        conn.reader.max_header, conn.reader.max_payload = MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES
        self._by_rank[rank] = conn
        proven = proof(self._secret, "hub", conn.nonce, hello["nonce"], rank, hello["world_size"])
        self._outbox.extend(self._node.on_joined(rank))
        self._send(conn, [*encode({"t": "welcome", "proof": proven}), *self._kept.pop(rank, ())])

    def _deliver(self) -> None:
        while self._outbox:
            message = self._outbox.popleft()
            for clients, header in deliveries(message, self._node.rank, self._node.world_size, self._clients):
                buffers = encode(header, message.payload)
                for client in clients:
                    if client != PARENT:
                        self._queue_for(client, buffers)
                    elif self._uplink is not None:
                        self._send(self._uplink, buffers)

    def _queue_for(self, client: int, buffers: list[Buffer]) -> None:
        conn = self._by_rank.get(client)
        if conn is not None:
            self._send(conn, buffers)
        elif client not in self._node.joined:
            self._kept.setdefault(client, []).extend(buffers)

    def _send(self, conn: Connection, buffers: list[Buffer]) -> None:
        try:
            conn.send(buffers)
        except OSError as error:
            self._lose(conn, error)
            return
        self._note_sent(conn)

    def _flush(self, conn: Connection) -> None:
        try:
            conn.flush()
        except OSError as error:
            self._lose(conn, error)
            return
        self._note_sent(conn)

    def _note_sent(self, conn: Connection) -> None:
        if conn.last_words and not conn.queue:
            self._drop(conn)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if conn.queue else 0)
        if events != conn.events:
            conn.events = events
            self._selector.modify(conn.sock, events, conn)

    def _lose(self, conn: Connection, error: BaseException) -> None:
        if conn is self._uplink:
            self._lose_parent(is_silent=is_of_link(error))
            return
        if conn.rank is not None and is_of_link(error):
            self._outbox.extend(self._node.on_silent(conn.rank))
        self._drop(conn)

    def _drop(self, conn: Connection) -> None:
        if conn is self._uplink:
            self._lose_parent(is_silent=False)
        if conn.closed:
            return
        conn.closed = True
        self._strangers.pop(conn, None)
        self._selector.unregister(conn.sock)
        conn.sock.close()
        conn.queue.clear()
        if conn.rank is not None:
            del self._by_rank[conn.rank]
            self._outbox.extend(self._node.on_gone(conn.rank))
            with self._ends:
                self._ends.notify_all()

    def _warn(self, conn: Connection, text: str, what: object) -> None:
        """Say what a connection did; of strangers, who may be many, only the first few times."""
        if conn.rank is not None:
            _log.warning("side channel: rank %d %s", conn.rank, text % what)
            return
        self._num_warnings += 1
        if self._num_warnings <= _MAX_WARNINGS:
            last = "; further strangers are not reported" if self._num_warnings == _MAX_WARNINGS else ""
            _log.warning("side channel: a stranger %s%s", text % what, last)


def _name_of(rank: int) -> str:
    return f"farspan-side-relay-{rank}" if rank else "farspan-side-hub"
