"""Streams of bytes between two ranks, over MPI: they have what pulls use of a socket.

opener                                                       other rank
  its number of the stream, "open"       ------------------>   a stream of the same number, for its listener
  number, data                           <----------------->   number, data
  number, "end"                          <----------------->   reads come to their end
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from farspan.comm.mpi.progress import Posted, Progress
from farspan.control.wire import Buffer

__all__ = ["MpiStreams", "Stream"]

_PREFIX = struct.Struct("!QiB")  # number of the stream, the rank that has opened it, kind
_OPEN, _DATA, _END = 0, 1, 2
_MOST_BYTES = 4 << 20
"""Of one message."""
_MOST_UNSENT = 4
"""Messages that a stream may have on their way."""


class Stream:
    """One end of a stream."""

    def __init__(self, streams: MpiStreams, peer: int, key: tuple[int, int]) -> None:
        self.peer = peer
        self.key = key
        self._streams = streams
        self._arrived: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._rest = memoryview(b"")
        self._has_ended = False
        self._is_shut = False
        self._timeout_s: float | None = None
        self._unsent: list[Posted] = []

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def recv_into(self, target: memoryview) -> int:
        """Waits for bytes, and puts as many as there are, and fit, into `target`.

        Returns:
            How many; 0 if the other end, or this one, has ended.

        Raises:
            TimeoutError: None have come in time.
        """
        while not self._rest:
            if self._has_ended or self._is_shut:
                return 0
            try:
                with self._waiting():
                    data = self._arrived.get(timeout=self._timeout_s)
            except queue.Empty:
                raise TimeoutError(f"nothing came from rank {self.peer} in {self._timeout_s:g} s") from None
            self._has_ended = data is None
            self._rest = data if data is not None else self._rest
        size = min(len(self._rest), len(target))
        target[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size

    def _waiting(self) -> AbstractContextManager[None]:
        """Entered while it waits for bytes: who has opened it waits for an answer, the other end for a question."""
        return self._streams.hurrying() if self.key[0] == self._streams.rank else contextlib.nullcontext()

    def sendmsg(self, buffers: Iterable[Buffer]) -> int:
        """Sends the beginning of some bytes; returns how many.

        Raises:
            TimeoutError: The other end has not taken earlier ones in time.
            ConnectionError: The stream has ended.
        """
        if self._is_shut:
            raise ConnectionError("the stream has ended")
        while len(self._unsent) >= _MOST_UNSENT:
            self._unsent.pop(0).wait(_LONGEST_S if self._timeout_s is None else self._timeout_s)
        parts: list[Buffer] = []
        size = 0
        for buffer in buffers:
            part = memoryview(buffer)[: _MOST_BYTES - size]
            parts.append(part)
            size += len(part)
            if size == _MOST_BYTES:
                break
        sent = self._streams.post(self, _DATA, b"".join(parts))
        self._unsent += [sent] if sent is not None else []
        return size

    def shutdown(self, how: int) -> None:
        """Ends both directions, from any thread: a read that waits returns."""
        self._is_shut = True
        self._arrived.put(None)

    def close(self) -> None:
        self.shutdown(0)
        self._streams.end(self)

    def take(self, data: memoryview | None) -> None:
        """Something has come; None for the end."""
        self._arrived.put(data)


_LONGEST_S = 1e9


class MpiStreams:
    """All streams of one rank of one side channel.

    Args:
        progress: Moves the messages.
        tag: Of them.
        first: The rank in the communicator of messages that is rank 0 of the side channel.
    """

    def __init__(self, progress: Progress, tag: int, first: int) -> None:
        self._progress = progress
        self._tag = tag
        self._first = first
        self.rank = progress.rank - first
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], Stream] = {}
        """By the rank that has opened it, and its number there."""
        self._accept: Callable[[int, Stream], None] | None = None
        progress.open(tag, self._on_message)

    def connect(self, rank: int) -> Stream:
        """Opens a stream to a rank."""
        stream = Stream(self, rank, (self.rank, next(self._numbers)))
        with self._lock:
            self._open[stream.key] = stream
        self.post(stream, _OPEN, b"")
        return stream

    def serve(self, accept: Callable[[int, Stream], None]) -> None:
        """Hand streams that others open to `accept`, which must not block."""
        self._accept = accept

    def hurrying(self) -> AbstractContextManager[None]:
        return self._progress.hurrying()

    def post(self, stream: Stream, kind: int, data: bytes) -> Posted | None:
        opener, number = stream.key
        return self._progress.post(self._first + stream.peer, self._tag, _PREFIX.pack(number, opener, kind) + data)

    def end(self, stream: Stream) -> None:
        with self._lock:
            known = self._open.pop(stream.key, None)
        if known is not None:
            self.post(stream, _END, b"")

    def _on_message(self, source: int, message: bytearray) -> None:
        number, opener, kind = _PREFIX.unpack_from(message)
        key, peer = (opener, number), source - self._first
        if kind == _OPEN:
            stream = Stream(self, peer, key)
            with self._lock:
                self._open[key] = stream
            if self._accept is None:
                stream.close()
            else:
                self._accept(peer, stream)
            return
        with self._lock:
            known = self._open.get(key)
        if known is not None:
            known.take(None if kind == _END else memoryview(message)[_PREFIX.size :])
