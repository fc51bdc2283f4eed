"""One connection of the hub, or of a relay, to another rank: it never blocks."""

from __future__ import annotations

import contextlib
import itertools
import math
import selectors
import socket
import time
from collections import deque

from farspan.control.wire import (
    LINK_DEAD_S,
    LINK_SILENT_S,
    MAX_BUFFERS,
    Buffer,
    FrameReader,
    advance,
    is_resending,
    nonce,
    silence_s,
)

__all__ = ["Connection"]


class Connection:
    """One socket: its incoming frames, and a queue of outgoing buffers."""

    def __init__(self, sock: socket.socket, reader: FrameReader) -> None:
        self.sock = sock
        self.rank: int | None = None
        self.nonce = nonce()
        self._resending_since = math.inf
        self.reader = reader
        self.queue: deque[Buffer] = deque()
        self.events = selectors.EVENT_READ
        self.last_words = False
        """Close as soon as the queue is empty."""
        self.closed = False

    def is_dead(self) -> bool:
        """Returns whether nothing has got through for long. It must be asked now and then."""
        self._resending_since = min(self._resending_since, time.monotonic()) if is_resending(self.sock) else math.inf
        return time.monotonic() - self._resending_since > LINK_DEAD_S

    def is_silent(self) -> bool:
        """Returns whether no sign of life has come from the other end for long, and nothing that has come waits to be
        read: a rank that is too busy to read does not take that for silence.
        """
        if silence_s(self.sock) <= LINK_SILENT_S:
            return False
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass  # reading will say what it is
        return False

    def send(self, buffers: list[Buffer]) -> None:
        """Sends as much as the socket takes now; the rest is queued."""
        if not self.queue and len(buffers) <= MAX_BUFFERS:
            with contextlib.suppress(BlockingIOError):
                buffers = advance(buffers, self.sock.sendmsg(buffers))
        self.queue.extend(buffers)

    def flush(self) -> None:
        """Sends as much as the socket takes now of what is queued."""
        while self.queue:
            buffers = list(itertools.islice(self.queue, MAX_BUFFERS))
            try:
                left = advance(buffers, self.sock.sendmsg(buffers))
            except BlockingIOError:
                return
            for _ in buffers:
                self.queue.popleft()
            self.queue.extendleft(reversed(left))
