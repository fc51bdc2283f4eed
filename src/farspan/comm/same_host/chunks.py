"""A large message in chunks, which receiver and sender copy together: one core alone cannot use all the bandwidth.

    receiver    puts the chunks into a queue, takes them out one by one and reads each from the sender's memory
    sender      where it waits for something meanwhile, takes chunks too and writes them into the receiver's memory

The queue is a socket whose reading end both have, so the kernel gives each chunk to one of them. A sender that computes
takes none, and the receiver copies them all.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple

import torch

from farspan.comm.same_host.packet_socket import Ending

__all__ = ["WHOLE_BYTES", "Chunk", "ChunkQueue", "OutstandingWrite", "OutstandingWrites", "take_chunk"]

WHOLE_BYTES = 1 << 20
"""The largest message that the receiver copies alone: until the sender has woken up it would be done."""

Read = Callable[[int, int, int], None]

_LARGEST, _SMALLEST = 2 << 20, 512 << 10
_PART = 4  # of what is left is the next chunk
_PAGE = 4096
_CHUNK = struct.Struct("=QQQQ")


class Chunk(NamedTuple):
    """A range of bytes to copy, and the message it belongs to."""

    message: int
    source: int
    """Its address in the sender."""
    destination: int
    """Its address in the receiver."""
    size: int


class OutstandingWrite:
    """Memory that a peer may be writing to: chunks of a message that it has taken and has not written yet."""

    def __init__(self, message: int, flat: torch.Tensor) -> None:
        self.message = message
        self.flat = flat
        self.num_chunks = 0
        self.transfer: Ending | None = None
        """The transfer that ends with the last of its chunks."""


class OutstandingWrites:
    """All writes of one same-host peer that are not known to be done. Their memory is kept until they are, whatever
    becomes of the transfers and of this object: until this process ends, where the peer can no longer say so.
    """

    _kept: ClassVar[set[OutstandingWrite]] = set()

    def __init__(self) -> None:
        self._by_message: dict[int, OutstandingWrite] = {}
        self._num_messages = 0

    def begin(self, flat: torch.Tensor) -> OutstandingWrite:
        self._num_messages += 1
        write = self._by_message[self._num_messages] = OutstandingWrite(self._num_messages, flat)
        self._kept.add(write)
        return write

    def end_chunks(self, message: int, num_chunks: int) -> None:
        """Ends so many chunks: they need no longer be waited for."""
        write = self._by_message[message]
        write.num_chunks -= num_chunks
        if not write.num_chunks:
            del self._by_message[message]
            self._kept.discard(write)
            if write.transfer is not None:
                write.transfer.end()

    def end(self) -> None:
        """The peer's process has ended."""
        self._kept.difference_update(self._by_message.values())


class ChunkQueue:
    """The receiver's side of a queue, which is empty but in `copy`."""

    def __init__(self) -> None:
        self._entry, self.exit = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._entry.setblocking(False)
        self.exit.setblocking(False)
        self._waiting: deque[Chunk] = deque()
        """Chunks that the socket has not taken yet."""

    def copy(self, flat: torch.Tensor, source: int, read: Read, outstanding: OutstandingWrites) -> OutstandingWrite:
        """Offer a message in chunks, and read those that the peer does not take.

        Args:
            flat: Where to.
            source: Its address in the peer.
            read: Copies to an address here, from an address there, so many bytes.
            outstanding: Those of the peer.

        Returns:
            The chunks that it has taken.
        """
        write = outstanding.begin(flat)
        self._waiting.extend(_parts(Chunk(write.message, source, flat.data_ptr(), flat.nbytes)))
        write.num_chunks = len(self._waiting)
        num_mine = 0
        try:
            while (chunk := self._next()) is not None:
                num_mine += 1
                read(chunk.destination, chunk.source, chunk.size)
        finally:
            outstanding.end_chunks(write.message, num_mine + self._withdraw())
        return write

    def close(self) -> None:
        self._entry.close()
        self.exit.close()

    def _next(self) -> Chunk | None:
        """Returns a chunk for this rank. The peer may empty the socket faster than this rank fills it."""
        chunk = None
        while chunk is None and self._fill():
            chunk = take_chunk(self.exit)
        return chunk if chunk is not None else take_chunk(self.exit)

    def _fill(self) -> bool:
        """Put in what the socket takes; whether more is waiting."""
        while self._waiting:
            try:
                self._entry.send(_CHUNK.pack(*self._waiting[0]))
            except BlockingIOError:
                return True
            self._waiting.popleft()
        return False

    def _withdraw(self) -> int:
        """Take what is left, so that nobody copies it; the number of chunks."""
        num_left = len(self._waiting)
        self._waiting.clear()
        while take_chunk(self.exit) is not None:
            num_left += 1
        return num_left


def take_chunk(queue_exit: socket.socket) -> Chunk | None:
    """Returns a chunk that is now the caller's to copy; None if there is none, also where the receiver has closed the
    queue."""
    try:
        packet = queue_exit.recv(_CHUNK.size)
    except BlockingIOError:
        return None
    return Chunk(*_CHUNK.unpack(packet)) if packet else None


def _parts(whole: Chunk) -> Iterator[Chunk]:
    """Large ones first, so that they are few; small ones last, so that both ends have done at about the same time."""
    message, source, destination, left = whole
    while left:
        size = min(left, max(_SMALLEST, min(_LARGEST, left // _PART // _PAGE * _PAGE)))
        yield Chunk(message, source, destination, size)
        source, destination, left = source + size, destination + size, left - size
