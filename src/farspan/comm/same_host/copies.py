"""CPU tensors between processes of one host: the receiver copies straight out of the sender's memory.

    small     sender: header and content in one packet      ------->  receiver: copies into its buffer
    large     sender: header with address and size          ------->  receiver: process_vm_readv into its buffer,
              lets go of the tensor                         <-------            then acks
    larger    a sender that waits helps: process_vm_writev  ------->  (see chunks.py)

So a large tensor is copied once, into memory that is the receiver's own, and there is no shared memory whose life time
somebody must manage. There is no thread either: whoever sends, asks or waits serves all connections meanwhile.

Nothing blocks a sender: what a socket does not take is queued. Acks have a connection of their own, and of each channel
only so many large messages are announced at a time that their acks fit into it: an ack is never left behind in a
receiver that has what it waited for and goes off to compute.
"""

from __future__ import annotations

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

from farspan.comm.same_host.chunks import WHOLE_BYTES, OutstandingWrite, OutstandingWrites, take_chunk
from farspan.comm.same_host.packet_socket import Lane, Packet, shut_down
from farspan.comm.same_host.peers import Exchange, OtherMemory, SameHostPeer, find_same_host_peers, resume
from farspan.comm.transport import TransferError

__all__ = ["INLINE_BYTES", "MAX_ANNOUNCED", "SameHostTransport"]

INLINE_BYTES = 32 * 1024
"""The largest message that travels in its packet; at 64 KiB that is no faster than announcing it."""
MAX_ANNOUNCED = 128
"""Large messages of a channel that may be without ack: the acks of two channels fit into a socket of default size."""

_SPIN_S = 50e-6  # about what waking up from a wait in the kernel costs
_SPIN_TRIALS, _SPIN_PERIOD = 2, 64  # of so many waits in a row that took longer, so many spin
_LONGEST_POLL_S = 3600.0
_PACKETS_PER_CALL = 64
_HEADER = struct.Struct("=qqQ")  # channel, address or _INLINE, size of the content
_ACK = struct.Struct("=qQ")  # channel: the first message of it that is without ack; or _WRITTEN and a message
_WRITTEN = -(1 << 62)  # no channel: the sender has written a chunk of the message
_INLINE = -1


class _Transfer:
    """A send or a receive: under way, over, or broken together with its connection."""

    __slots__ = ("channel", "connection", "error", "flat", "is_over", "transport", "size")

    def __init__(self, transport: SameHostTransport, connection: _Connection, flat: torch.Tensor, channel: int) -> None:
        self.transport = transport
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
        """Returns whether the transfer has ended.

        Raises:
            TransferError: It cannot end well any more.
        """
        if self._check():
            return True
        self.transport.serve(0.0, _PACKETS_PER_CALL)
        return self._check()

    def wait(self, deadline_s: float) -> None:
        """Return when it is over, serving all connections meanwhile.

        Raises:
            TimeoutError: It is not over after `deadline_s` seconds.
            TransferError: It cannot end well any more.
        """
        if self._check():
            return
        now = time.monotonic()
        end, spin_end = now + deadline_s, now + self.transport.spin_s()
        while not self._check():
            if now >= end:
                if self.is_done():
                    return
                raise TimeoutError(f"a transfer with rank {self.connection.rank} has not ended in {deadline_s:g} s")
            self.transport.serve(0.0 if now < spin_end else end - now, 1, helps=True)
            now = time.monotonic()
        self.transport.num_long_waits = 0 if now < spin_end else self.transport.num_long_waits + 1

    def _check(self) -> bool:
        if self.error:
            raise TransferError(self.error)
        if not self.is_over:
            self.transport.raise_if_broken(self.connection)
        return self.is_over


class _Connection:
    """The connection between this rank and one same-host peer, with its transfers."""

    def __init__(self, peer: SameHostPeer, epoll: select.epoll) -> None:
        self.rank = peer.rank
        self.pidfd = peer.pidfd
        self.memory = OtherMemory(peer.pid)
        self.my_chunks = peer.my_chunks
        self.its_chunks = peer.its_chunks
        self.messages = Lane(peer.messages, epoll)
        self.acks = Lane(peer.acks, epoll)
        for descriptor in (self.pidfd, self.its_chunks.fileno()):
            epoll.register(descriptor, select.EPOLLIN)
        self.ending = ""
        """The reason why it must end; what the peer had sent before is still to be taken."""
        self.error = ""
        """The reason why it has ended."""
        self.posted: defaultdict[int, deque[_Transfer]] = defaultdict(deque)
        """Receives without a message, by channel."""
        self.arrived: defaultdict[int, deque[tuple[int, int, bytes]]] = defaultdict(deque)
        """Messages without a receive: address or _INLINE, size, content."""
        self.announced: defaultdict[int, deque[_Transfer]] = defaultdict(deque)
        """Large sends without ack: the peer may be reading their memory."""
        self.held: defaultdict[int, deque[_Transfer]] = defaultdict(deque)
        """Sends behind as many announced ones as there may be."""
        self.outstanding = OutstandingWrites()

    def must_end(self, reason: str = "") -> None:
        self.ending = self.ending or reason or f"Connection closed by peer (rank {self.rank})"

    def must_end_by(self, failure: OSError, what: str) -> None:
        self.must_end("" if failure.errno == errno.ESRCH else f"{what} rank {self.rank}'s memory: {failure}")


class SameHostTransport:
    """Transfers with the same-host peers of this rank. All but `abort` and `resume` is for one thread."""

    def __init__(self, rank: int, peers: Sequence[SameHostPeer], *, has_core_for_each: bool) -> None:
        self.rank = rank
        self.num_long_waits = 0
        """Waits in a row that spinning did not end."""
        self._has_core_for_each = has_core_for_each
        self._is_aborted = False
        self._epoll = select.epoll()
        self._connections = {peer.rank: _Connection(peer, self._epoll) for peer in peers}
        self._watched: dict[int, tuple[_Connection, Lane | None]] = {}
        for connection in self._connections.values():
            for descriptor in (connection.pidfd, connection.its_chunks.fileno()):
                self._watched[descriptor] = connection, None
            for lane in (connection.messages, connection.acks):
                self._watched[lane.sock.fileno()] = connection, lane
        self._sockets = [lane.sock for _, lane in self._watched.values() if lane is not None]
        self._in, self._out = Packet(_HEADER.size, INLINE_BYTES), Packet(_HEADER.size, INLINE_BYTES)
        # Runs before the tensors go that a peer may be reading, so that it cannot take what comes after for them.
        self.close = weakref.finalize(self, _close, os.getpid(), self._sockets, list(peers), self._epoll)
        self.close.atexit = False  # what waits may run at the end of the process

    @classmethod
    def join(cls, rank: int, exchange: Exchange, deadline_s: float) -> SameHostTransport | None:
        """Connect to the ranks on this host that can be reached so; None where there are none.

        Args:
            rank: This rank.
            exchange: Gathers a few bytes of all ranks, by rank. Called twice on every rank; all ranks call `join`.
            deadline_s: The longest wait for connections. What `exchange` waits is its own.
        """
        found = find_same_host_peers(rank, exchange, deadline_s)
        return cls(rank, found.peers, has_core_for_each=found.has_core_for_each) if found.peers else None

    def reaches(self, rank: int) -> bool:
        """Returns whether `rank` is a same-host peer; both ends say the same."""
        return rank in self._connections

    def wait_ended(self, rank: int, deadline_s: float) -> None:
        """Return when the process of a rank has ended, if it is on this host, or after the deadline."""
        connection = self._connections.get(rank)
        if connection is not None:
            select.select([connection.pidfd], [], [], deadline_s)

    def checks_sizes(self, src: int) -> bool:
        return True

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
            self._match(connection, transfer, *arrived.popleft())
            self._end_if_due(connection)
        else:
            connection.posted[channel].append(transfer)
        return transfer

    def abort(self) -> None:
        self._is_aborted = True
        shut_down(self._sockets)  # which also wakes a wait
        self.resume()

    def resume(self) -> None:
        """Let the processes of the other ranks go on if they are stopped: they are to end, and their launcher waits."""
        resume([connection.pidfd for connection in self._connections.values()])

    def raise_if_broken(self, connection: _Connection) -> None:
        if self._is_aborted:
            shut_down(self._sockets)  # the aborting thread may not have come to it, and the caller releases tensors
            raise TransferError("connection aborted")
        if connection.error:
            raise TransferError(connection.error)

    def spin_s(self) -> float:
        """Returns how long to spin before the wait in the kernel; on a busy machine the peer needs the core."""
        is_promising = self.num_long_waits % _SPIN_PERIOD < _SPIN_TRIALS
        return _SPIN_S if self._has_core_for_each and is_promising else 0.0

    def serve(self, timeout_s: float, max_rounds: int, *, helps: bool = False) -> None:
        """Wait until there is something to do on any connection, and do it.

        Args:
            helps: Whether that includes copying chunks of what this rank has sent.
        """
        for _ in range(max_rounds):
            events = self._epoll.poll(min(timeout_s, _LONGEST_POLL_S))
            has_done = False
            for descriptor, mask in events:
                has_done |= self._on_event(descriptor, mask, helps=helps)
            if not has_done:
                return

    def _on_event(self, descriptor: int, mask: int, *, helps: bool) -> bool:
        """Handles what has come; returns whether there was something to do."""
        connection, lane = self._watched[descriptor]
        if descriptor == connection.pidfd:
            self._on_process_end(connection)
        elif connection.error:
            return True  # it has ended in this very round
        elif lane is None:
            if not helps:
                return False
            self._help(connection)
        else:
            if mask & select.EPOLLOUT:
                self._flush(connection, lane)
            if mask & ~select.EPOLLOUT:
                self._take(connection, lane)
        self._end_if_due(connection)
        return True

    def _on_process_end(self, connection: _Connection) -> None:
        self._epoll.unregister(connection.pidfd)
        connection.outstanding.end()
        connection.must_end()

    def _help(self, connection: _Connection) -> None:
        """Copy a chunk of what this rank has sent, if the peer has not taken them all."""
        chunk = take_chunk(connection.its_chunks)
        if chunk is None:
            return
        try:
            connection.memory.write(chunk.source, chunk.destination, chunk.size)
        except OSError as failure:
            connection.must_end_by(failure, f"cannot write {chunk.size} bytes of")
            self._end(connection)  # the peer may ack the message, of which this chunk is missing
            return
        if not connection.acks.send(_ACK.pack(_WRITTEN, chunk.message)):
            connection.must_end()

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

    def _flush(self, connection: _Connection, lane: Lane) -> None:
        if not lane.flush():
            connection.must_end()
        elif not lane.queue:
            self._epoll.modify(lane.sock.fileno(), select.EPOLLIN)

    def _take(self, connection: _Connection, lane: Lane) -> bool:
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

    def _on_ack(self, connection: _Connection, channel: int, message: int) -> None:
        if channel == _WRITTEN:
            connection.outstanding.end_chunks(message, 1)
            return
        announced, held = connection.announced[channel], connection.held[channel]
        announced.popleft().end()
        while held and len(announced) < MAX_ANNOUNCED:
            self._begin(connection, held.popleft())

    def _on_message(self, connection: _Connection, channel: int, address: int, size: int) -> None:
        posted = connection.posted[channel]
        if posted:
            self._match(connection, posted.popleft(), address, size, self._in.content_address)
        else:
            end = _HEADER.size + size if address == _INLINE else 0
            connection.arrived[channel].append((address, size, bytes(self._in.view[_HEADER.size : end])))

    def _match(
        self, connection: _Connection, transfer: _Transfer, address: int, size: int, content: bytes | int
    ) -> None:
        """Complete a receive with its message. Where the memory or the ack fails, so does the connection."""
        assert transfer.flat is not None
        error, write = "", None
        if size != transfer.size:
            error = f"rank {connection.rank} sent {size} bytes where {transfer.size} were to be received"
        elif address == _INLINE:
            ctypes.memmove(transfer.flat.data_ptr(), content, size)
        elif connection.ending:
            return  # nobody keeps that memory any more
        else:
            try:
                write = self._read(connection, transfer.flat, address)
            except OSError as failure:
                connection.must_end_by(failure, f"cannot read {size} bytes of")
                return
        if address != _INLINE and not connection.acks.send(_ACK.pack(transfer.channel, 0)):
            connection.must_end()  # and its memory may have been used for something else while it was read
        elif write is not None and write.num_chunks:
            write.transfer = transfer
        else:
            transfer.end(error)

    def _read(self, connection: _Connection, flat: torch.Tensor, address: int) -> OutstandingWrite | None:
        """Copy a large message, alone or together with the sender."""
        if flat.nbytes > WHOLE_BYTES:
            return connection.my_chunks.copy(flat, address, connection.memory.read, connection.outstanding)
        connection.memory.read(flat.data_ptr(), address, flat.nbytes)
        return None

    def _end_if_due(self, connection: _Connection) -> None:
        """End a connection that must, but only after taking all that the peer has sent before."""
        if not connection.ending or connection.error:
            return
        shut_down([connection.acks.sock, connection.messages.sock])
        for lane in (connection.acks, connection.messages):
            while self._take(connection, lane):
                pass
        self._end(connection)

    def _end(self, connection: _Connection) -> None:
        shut_down([connection.acks.sock, connection.messages.sock])
        connection.error = connection.ending
        for sock in (connection.acks.sock, connection.messages.sock, connection.its_chunks):
            self._epoll.unregister(sock)
        for transfers in (connection.posted, connection.announced, connection.held):
            transfers.clear()


def _close(pid: int, sockets: Sequence[socket.socket], peers: Sequence[SameHostPeer], epoll: select.epoll) -> None:
    if os.getpid() == pid:  # in a fork, the connections are still the parent's
        shut_down(sockets)
    epoll.close()
    for peer in peers:
        peer.close()
