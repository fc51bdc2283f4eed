"""CPU tensors between processes of one host: the receiver copies straight out of the sender's memory.

    small     sender: header and content in one packet      ------->  receiver: copies into its buffer
    large     sender: header with address and size          ------->  receiver: process_vm_readv into its buffer,
              lets go of the tensor                         <-------            then acks

So a large tensor is copied once, into memory that is the receiver's own, and there is no shared memory whose life time
somebody must manage. There is no thread either: whoever sends, asks or waits serves all connections meanwhile.

Nothing blocks a sender: what a socket does not take is queued. Acks have a connection of their own, and of each channel
only so many large messages are announced at a time that their acks fit into it: an ack is never left behind in a
receiver that has what it waited for and goes off to compute.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import socket
import struct
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence

import torch

from farspan.runtime.media.neighbours import Exchange, MemoryReader, Neighbour, find_neighbours

__all__ = ["INLINE_BYTES", "MAX_ANNOUNCED", "SameHostMedium"]

INLINE_BYTES = 32 * 1024
"""The largest message that travels in its packet; at 64 KiB that is no faster than announcing it."""
MAX_ANNOUNCED = 128
"""Large messages of a channel that may be without ack: the acks of two channels fit into a socket of default size."""

_SPIN_S = 50e-6  # about what waking up from a wait in the kernel costs
_SPIN_TRIALS, _SPIN_PERIOD = 2, 64  # of so many waits in a row that took longer, so many spin
_LONGEST_POLL_S = 3600.0
_PACKETS_PER_CALL = 64
_SEND_BUFFER_BYTES = 4 << 20  # the system grants what it allows
_HEADER = struct.Struct("=qqQ")  # channel, address or _INLINE, size of the content
_ACK = struct.Struct("=q")  # channel: the first message of it that is without ack
_INLINE = -1


class _Packet:
    """The memory of one packet, and where its content lies."""

    def __init__(self) -> None:
        self.memory = bytearray(_HEADER.size + INLINE_BYTES)
        self.view = memoryview(self.memory)
        self.content_address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory, _HEADER.size))


class _Transfer:
    """A send or a receive: under way, over, or broken together with its connection."""

    __slots__ = ("channel", "connection", "error", "flat", "is_over", "medium", "size")

    def __init__(self, medium: SameHostMedium, connection: _Connection, flat: torch.Tensor, channel: int) -> None:
        self.medium = medium
        self.connection = connection
        self.channel = channel
        self.size = flat.nbytes
        self.flat: torch.Tensor | None = flat  # its memory is read or written until the transfer is over
        self.is_over = False
        self.error = ""

    def end(self, error: str = "") -> None:
        self.flat = None
        self.error = error
        self.is_over = True

    def is_done(self) -> bool:
        """Whether it is over.

        Raises:
            RuntimeError: It cannot end well any more.
        """
        if self._check():
            return True
        self.medium.serve(0.0, _PACKETS_PER_CALL)
        return self._check()

    def wait(self, deadline_s: float) -> None:
        """Return when it is over, serving all connections meanwhile.

        Raises:
            TimeoutError: It is not over after `deadline_s` seconds.
            RuntimeError: It cannot end well any more.
        """
        if self._check():
            return
        now = time.monotonic()
        end, spin_end = now + deadline_s, now + self.medium.spin_s()
        while not self._check():
            if now >= end:
                if self.is_done():
                    return
                raise TimeoutError(f"a transfer with rank {self.connection.rank} has not ended in {deadline_s:g} s")
            self.medium.serve(0.0 if now < spin_end else end - now, 1)
            now = time.monotonic()
        self.medium.num_long_waits = 0 if now < spin_end else self.medium.num_long_waits + 1

    def _check(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        if not self.is_over:
            self.medium.raise_if_broken(self.connection)
        return self.is_over


class _Lane:
    """One of the two sockets of a connection, and what it has not taken yet."""

    def __init__(self, sock: socket.socket, epoll: select.epoll) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self.sock = sock
        self.epoll = epoll
        self.queue: deque[tuple[bytes | memoryview, _Transfer | None]] = deque()
        epoll.register(sock.fileno(), select.EPOLLIN)

    def send(self, packet: bytes | memoryview, transfer: _Transfer | None = None) -> bool:
        """Send, or queue; `transfer` is over when the socket has taken the packet. False if the peer has closed."""
        if self.queue:
            self.queue.append((bytes(packet), transfer))
            return True
        self.queue.append((packet, transfer))
        is_open = self.flush()
        if self.queue:
            self.queue[0] = (bytes(packet), transfer)
            self.epoll.modify(self.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
        return is_open

    def flush(self) -> bool:
        """Send what is queued as far as the socket takes it. False if the peer has closed."""
        while self.queue:
            packet, transfer = self.queue[0]
            try:
                self.sock.send(packet, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            self.queue.popleft()
            if transfer is not None:
                transfer.end()
        return True


class _Connection:
    """What is between this rank and one neighbour."""

    def __init__(self, neighbour: Neighbour, epoll: select.epoll) -> None:
        self.rank = neighbour.rank
        self.pidfd = neighbour.pidfd
        self.reader = MemoryReader(neighbour.pid)
        self.messages = _Lane(neighbour.messages, epoll)
        self.acks = _Lane(neighbour.acks, epoll)
        epoll.register(self.pidfd, select.EPOLLIN)
        self.ending = ""
        """Why it must end; what the peer had sent before is still to be taken."""
        self.error = ""
        """Why it has ended."""
        self.posted: defaultdict[int, deque[_Transfer]] = defaultdict(deque)
        """Receives without a message, by channel."""
        self.arrived: defaultdict[int, deque[tuple[int, int, bytes]]] = defaultdict(deque)
        """Messages without a receive: address or _INLINE, size, content."""
        self.announced: defaultdict[int, deque[_Transfer]] = defaultdict(deque)
        """Large sends without ack: the neighbour may be reading their memory."""
        self.held: defaultdict[int, deque[_Transfer]] = defaultdict(deque)
        """Sends behind as many announced ones as there may be."""

    def must_end(self, reason: str = "") -> None:
        self.ending = self.ending or reason or f"Connection closed by peer (rank {self.rank})"


class SameHostMedium:
    """Transfers with the neighbours of this rank. All but `abort` is for one thread."""

    def __init__(self, rank: int, neighbours: Sequence[Neighbour], *, has_core_for_each: bool) -> None:
        self.rank = rank
        self.num_long_waits = 0
        """Waits in a row that spinning did not end."""
        self._has_core_for_each = has_core_for_each
        self._is_aborted = False
        self._epoll = select.epoll()
        self._connections = {neighbour.rank: _Connection(neighbour, self._epoll) for neighbour in neighbours}
        self._lanes: dict[int, tuple[_Connection, _Lane | None]] = {}
        for connection in self._connections.values():
            self._lanes[connection.pidfd] = connection, None
            for lane in (connection.messages, connection.acks):
                self._lanes[lane.sock.fileno()] = connection, lane
        self._sockets = [lane.sock for _, lane in self._lanes.values() if lane is not None]
        self._in, self._out = _Packet(), _Packet()
        # Runs before the tensors go that a neighbour may be reading, so that it cannot take what comes after for them.
        pidfds = [neighbour.pidfd for neighbour in neighbours]
        weakref.finalize(self, _close, os.getpid(), self._sockets, pidfds, self._epoll)

    @classmethod
    def join(cls, rank: int, exchange: Exchange, deadline_s: float) -> SameHostMedium | None:
        """Connect to the ranks on this host that can be reached so; None where there are none.

        Args:
            rank: This rank.
            exchange: Gathers a few bytes of all ranks, by rank. Called twice on every rank; all ranks call `join`.
            deadline_s: The longest wait for connections. What `exchange` waits is its own.
        """
        found = find_neighbours(rank, exchange, deadline_s)
        return cls(rank, found.neighbours, has_core_for_each=found.has_core_for_each) if found.neighbours else None

    def reaches(self, rank: int) -> bool:
        """Whether `rank` is a neighbour; both ends say the same."""
        return rank in self._connections

    def send(self, flat: torch.Tensor, dst: int, channel: int) -> _Transfer:
        connection = self._connections[dst]
        self.raise_if_broken(connection)
        transfer = _Transfer(self, connection, flat, channel)
        if len(connection.announced[channel]) >= MAX_ANNOUNCED:  # else none is held
            connection.held[channel].append(transfer)
        else:
            self._begin(connection, transfer)
        self.serve(0.0, _PACKETS_PER_CALL)
        return transfer

    def receive(self, flat: torch.Tensor, src: int, channel: int) -> _Transfer:
        connection = self._connections[src]
        if self._is_aborted:
            self.raise_if_broken(connection)
        transfer = _Transfer(self, connection, flat, channel)
        arrived = connection.arrived[channel]
        if arrived:
            self._meet(connection, transfer, *arrived.popleft())
            self._end_if_due(connection)
        else:
            connection.posted[channel].append(transfer)
        return transfer

    def abort(self) -> None:
        self._is_aborted = True
        _shut_down(self._sockets)  # which also wakes a wait

    def raise_if_broken(self, connection: _Connection) -> None:
        if self._is_aborted:
            _shut_down(self._sockets)  # the aborting thread may not have come to it, and the caller lets go of tensors
            raise RuntimeError("connection aborted")
        if connection.error:
            raise RuntimeError(connection.error)

    def spin_s(self) -> float:
        """How long to spin before waiting in the kernel. On a busy machine that would keep the peer from its core."""
        is_promising = self.num_long_waits % _SPIN_PERIOD < _SPIN_TRIALS
        return _SPIN_S if self._has_core_for_each and is_promising else 0.0

    def serve(self, timeout_s: float, max_rounds: int) -> None:
        """Wait until there is something to do on any connection, and do it."""
        for _ in range(max_rounds):
            events = self._epoll.poll(min(timeout_s, _LONGEST_POLL_S))
            if not events:
                return
            for descriptor, mask in events:
                connection, lane = self._lanes[descriptor]
                if connection.error:
                    continue  # it has ended in this very round
                if lane is None:  # the process has ended
                    connection.must_end()
                else:
                    if mask & select.EPOLLOUT:
                        self._flush(connection, lane)
                    if mask & ~select.EPOLLOUT:
                        self._take(connection, lane)
                self._end_if_due(connection)

    def _begin(self, connection: _Connection, transfer: _Transfer) -> None:
        """Send a small message, announce a large one."""
        assert transfer.flat is not None
        address, size = transfer.flat.data_ptr(), transfer.size
        if size > INLINE_BYTES:
            connection.announced[transfer.channel].append(transfer)
            is_open = connection.messages.send(_HEADER.pack(transfer.channel, address, size))
        else:
            _HEADER.pack_into(self._out.memory, 0, transfer.channel, _INLINE, size)
            ctypes.memmove(self._out.content_address, address, size)
            is_open = connection.messages.send(self._out.view[: _HEADER.size + size], transfer)
        if not is_open:
            connection.must_end()

    def _flush(self, connection: _Connection, lane: _Lane) -> None:
        if not lane.flush():
            connection.must_end()
        elif not lane.queue:
            self._epoll.modify(lane.sock.fileno(), select.EPOLLIN)

    def _take(self, connection: _Connection, lane: _Lane) -> bool:
        """Take a packet; whether there was any."""
        try:
            count = lane.sock.recv_into(self._in.memory)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True  # the peer closed without taking all of ours; what it sent before comes now
        if not count:
            connection.must_end()
            return False
        if lane is connection.acks:
            self._on_ack(connection, *_ACK.unpack_from(self._in.memory))
        else:
            self._on_message(connection, *_HEADER.unpack_from(self._in.memory))
        return True

    def _on_ack(self, connection: _Connection, channel: int) -> None:
        announced, held = connection.announced[channel], connection.held[channel]
        announced.popleft().end()
        while held and len(announced) < MAX_ANNOUNCED:
            self._begin(connection, held.popleft())

    def _on_message(self, connection: _Connection, channel: int, address: int, size: int) -> None:
        posted = connection.posted[channel]
        if posted:
            self._meet(connection, posted.popleft(), address, size, self._in.content_address)
        else:
            end = _HEADER.size + size if address == _INLINE else 0
            connection.arrived[channel].append((address, size, bytes(self._in.view[_HEADER.size : end])))

    def _meet(
        self, connection: _Connection, transfer: _Transfer, address: int, size: int, content: bytes | int
    ) -> None:
        """Complete a receive with its message. Where the memory or the ack fails, so does the connection."""
        assert transfer.flat is not None
        error = ""
        if size != transfer.size:
            error = f"rank {connection.rank} sent {size} bytes where {transfer.size} were to be received"
        elif address == _INLINE:
            ctypes.memmove(transfer.flat.data_ptr(), content, size)
        elif connection.ending:
            return  # nobody keeps that memory any more
        else:
            try:
                connection.reader.read(transfer.flat.data_ptr(), address, size)
            except OSError as failure:
                ended = failure.errno == errno.ESRCH
                reason = f"cannot read {size} bytes of rank {connection.rank}'s memory: {failure}"
                connection.must_end("" if ended else reason)
                return
        if address != _INLINE and not connection.acks.send(_ACK.pack(transfer.channel)):
            connection.must_end()  # and its memory may have been used for something else while it was read
            return
        transfer.end(error)

    def _end_if_due(self, connection: _Connection) -> None:
        """End a connection that must, but only after taking all that the peer has sent before."""
        if not connection.ending or connection.error:
            return
        _shut_down([connection.acks.sock, connection.messages.sock])
        for lane in (connection.acks, connection.messages):
            while self._take(connection, lane):
                pass
        connection.error = connection.ending
        for descriptor in (connection.pidfd, connection.acks.sock, connection.messages.sock):
            self._epoll.unregister(descriptor)
        for transfers in (connection.posted, connection.announced, connection.held):
            transfers.clear()


def _shut_down(sockets: Sequence[socket.socket]) -> None:
    for sock in sockets:
        with contextlib.suppress(OSError):  # not connected any more, which is as wanted
            sock.shutdown(socket.SHUT_RDWR)


def _close(pid: int, sockets: Sequence[socket.socket], pidfds: Sequence[int], epoll: select.epoll) -> None:
    if os.getpid() == pid:  # in a fork, the connections are still the parent's
        _shut_down(sockets)
    epoll.close()
    for sock in sockets:
        sock.close()
    for pidfd in pidfds:
        os.close(pidfd)
