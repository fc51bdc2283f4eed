"""The control plane over MPI: the hub and relays of the sockets' tree, whose frames are messages instead.

rank 1 ---+                         a frame is one message; from one rank to another they arrive in order
          +--- hub (rank 0)         nobody connects, and nobody is refused: a communicator has its ranks
rank 2 ---+                         a death ends the job by MPI itself: no connection has to be watched
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from farspan.comm.mpi.progress import Posted, Progress
from farspan.comm.mpi.streams import MpiStreams
from farspan.control.hub.hub_state import Hub
from farspan.control.text import describe_death
from farspan.control.tree.deliveries import PARENT, deliveries
from farspan.control.tree.message import Message, Node
from farspan.control.tree.numbers import children, host_of, parent
from farspan.control.tree.relay import Relay
from farspan.control.wire import LOOK_S, Buffer, Frame, Header, ProtocolError, decode, encode

__all__ = ["MpiHub", "MpiLink", "Port", "open_ends"]

_log = logging.getLogger(__name__)
_SPARE_BYTES = 256
_FLUSH_S = 5.0
"""How long what the hub has sent last may take."""
_UP, _DOWN, _STREAMS, _NUM_TAGS = 0, 1, 2, 4
_REFUSED = (ProtocolError, KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError)


class Port:
    """What a side channel uses of the communicator of messages.

    Args:
        progress: Moves them.
        number: Of the side channel: tags are its own.
        first: The rank in that communicator which is rank 0 of the side channel.
        size: How many ranks the side channel has.
    """

    def __init__(self, progress: Progress, number: int, first: int, size: int) -> None:
        self.rank = progress.rank - first
        self.size = size
        self._progress = progress
        self._first_tag = number * _NUM_TAGS
        self._first = first

    def open(self, way: int, take: Callable[[int, Frame], None]) -> None:
        """Give what comes from below (_UP) or from above (_DOWN) to `take`: who has sent it, and the frame."""
        first = self._first
        self._progress.open(self._first_tag + way, lambda source, data: take(source - first, decode(data)))

    def post(self, rank: int, way: int, frame: bytes) -> Posted | None:
        return self._progress.post(self._first + rank, self._first_tag + way, frame)

    def hurrying(self) -> AbstractContextManager[None]:
        return self._progress.hurrying()

    def streams(self) -> MpiStreams:
        return MpiStreams(self._progress, self._first_tag + _STREAMS, self._first)


class MpiHub:
    """Hosts the hub of a side channel, or a relay: one thread that moves the node's messages.

    Args:
        node: What decides.
        port: Where the messages go.
        to_own: Takes those for the channel in this process; must not block.
    """

    def __init__(self, node: Node, port: Port, to_own: Callable[[Frame], None]) -> None:
        self._node = node
        self._port = port
        self._to_own = to_own
        self._clients = [node.rank, *children(node.rank, node.world_size)]
        self._arrived: queue.SimpleQueue[tuple[int, Frame] | None] = queue.SimpleQueue()
        """Frames with who has sent them, the node above too; None when the hub is to end."""
        self._sent: list[Posted] = []
        self._ends = threading.Condition()
        self._is_over = False
        port.open(_UP, lambda source, frame: self._arrived.put((source, frame)))
        port.open(_DOWN, lambda source, frame: self._arrived.put((PARENT, frame)))
        self._thread = threading.Thread(target=self._run, name=f"farspan-side-node-{node.rank}", daemon=True)
        self._thread.start()

    def wait_ended(self, linger_s: float) -> bool:
        """Waits until every rank below this one has said bye or heard of a failure; False where `linger_s` ran out."""
        others = {*self._node.ranks} - {self._node.rank}
        with self._ends:
            return self._ends.wait_for(
                lambda: others <= self._node.ended | self._node.died | self._node.heard or self._is_over,
                min(linger_s, threading.TIMEOUT_MAX),
            )

    def stop(self) -> None:
        """Ends the hub: what is queued goes out, ranks that still run get a failure. Idempotent."""
        self._arrived.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            for client in self._clients:
                self._deliver(self._node.on_joined(client))
            look_at = time.monotonic() + LOOK_S
            while True:
                try:
                    arrived = self._arrived.get(timeout=max(0.0, look_at - time.monotonic()))
                except queue.Empty:
                    self._deliver(self._node.on_tick())
                    look_at = time.monotonic() + LOOK_S
                    continue
                if arrived is None:
                    break
                self._handle(*arrived)
            self._deliver(self._node.on_shutdown())
            self._flush(_FLUSH_S)
        except Exception:
            _log.exception("the side channel's hub has failed on rank %d", self._node.rank)
        finally:
            with self._ends:
                self._is_over = True
                self._ends.notify_all()

    def _handle(self, source: int, frame: Frame) -> None:
        if source == PARENT:
            self._deliver(self._node.on_parent(frame.header, frame.payload))
            return
        try:
            messages = self._node.on_message(source, frame.header, frame.payload)
        except _REFUSED as error:
            _log.warning("side channel: rank %d sent %r: %r", source, frame.header.get("t"), error)
            messages = self._node.on_gone(source)
        self._deliver(messages)
        if frame.header.get("t") in ("bye", "gone", "heard"):
            with self._ends:
                self._ends.notify_all()

    def _deliver(self, messages: list[Message]) -> None:
        node = self._node
        for message in messages:
            for clients, header in deliveries(message, node.rank, node.world_size, self._clients):
                frame = b"".join(encode(header, message.payload))
                for client in clients:
                    self._send(client, frame)
        self._sent = [sent for sent in self._sent if not sent.is_over]

    def _send(self, client: int, frame: bytes) -> None:
        if client == self._node.rank:
            self._to_own(decode(frame))
            return
        to, way = (parent(self._node.rank), _UP) if client == PARENT else (client, _DOWN)
        sent = self._port.post(to, way, frame)
        self._sent += [sent] if sent is not None else []

    def _flush(self, limit_s: float) -> None:
        until = time.monotonic() + limit_s
        for sent in self._sent:
            try:
                sent.wait(max(0.0, until - time.monotonic()))
            except TimeoutError:
                _log.info("rank %d ends before rank %d has heard all", self._node.rank, sent.peer)


class MpiLink:
    """The link of a rank to the hub or relay that it speaks to: that of its own process, or another rank's.

    Args:
        port: Of the side channel.
    """

    address = ""

    def __init__(self, port: Port) -> None:
        self.streams = port.streams()
        self._port = port
        self._host = host_of(port.rank, port.size)
        self._arrived: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"farspan-side-{port.rank}", daemon=True)

    def take(self, frame: Frame) -> None:
        """A frame has come for this rank; it is kept until somebody listens."""
        self._arrived.put(frame)

    def listen(
        self,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[Header], None],
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_frame, self._on_end, self._on_turn = on_frame, on_end, on_turn
        self._thread.start()

    def send(self, header: Header, payload: Buffer = b"") -> None:
        self._port.post(self._host, _UP, b"".join(encode(header, payload, spare_bytes=_SPARE_BYTES)))

    def waiting(self) -> AbstractContextManager[None]:
        return self._port.hurrying()

    def is_listener(self) -> bool:
        return threading.current_thread() is self._thread

    def finish(self) -> None:
        self._arrived.put(None)

    def _run(self) -> None:
        look_at = time.monotonic() + LOOK_S
        try:
            while True:
                try:
                    frame = self._arrived.get(timeout=max(0.0, look_at - time.monotonic()))
                except queue.Empty:
                    self._on_turn()
                    look_at = time.monotonic() + LOOK_S
                    continue
                if frame is None:
                    return
                self._on_frame(frame)
                del frame  # its payload
        except Exception:
            _log.exception("the side channel's listener has failed")
            self._on_end(describe_death(self._host))


def open_ends(port: Port) -> tuple[MpiLink, MpiHub | None]:
    """Returns the link of this rank, and the hub or relay that its process hosts, if it does."""
    rank, size, link = port.rank, port.size, MpiLink(port)
    if host_of(rank, size) != rank:
        port.open(_DOWN, lambda source, frame: link.take(frame))
        return link, None
    return link, MpiHub(Hub(size) if rank == 0 else Relay(rank, size), port, link.take)
