"""Listens for other ranks that come for the tensors of this one: one thread lets them in, another answers each of
them. Where ranks have no addresses (MPI) they come by streams, and nobody has to be let in."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from farspan.comm.pulls.answers import Answer, encode_answer, frames_of
from farspan.control.channel import SideChannel
from farspan.control.hub.joining import Service, admit
from farspan.control.text import described
from farspan.control.wire import Buffer, Frame, FrameReader, ProtocolError, adopt, encode, send_all
from farspan.control.workers import Workers

__all__ = ["Answering", "Handler", "Listener", "StreamListener", "service_of"]

Handler = Callable[[dict[str, Any]], Answer]
"""A request to its answer; called in a thread, so it may block."""

_log = logging.getLogger(__name__)
_MAX_STRANGERS = 128
"""Connections that have not proven who they are yet, where there are no more ranks than that; the oldest goes when one
more comes."""
_MAX_WARNINGS = 10
"""Lines about strangers."""
_IDLE_S = 30.0
"""How long a connection is kept over which nothing is asked."""
_RETRY_S = 0.1


def service_of(rank: int) -> Service:
    return Service(f"reader of rank {rank}", f"owner, rank {rank}", "tensors")


class Answering:
    """What answers the other ranks, over the connections that they have to this one: a thread for each."""

    def __init__(self, side: SideChannel, handler: Handler) -> None:
        self._side = side
        self._handler = handler
        self._lock = threading.Lock()
        self._open: set[Any] = set()
        """The connections, sockets or streams."""
        self.num_answered = 0
        self._closed = threading.Event()
        self._workers = Workers(f"farspan-pulls-{side.rank}")

    def shut(self) -> None:
        """Lets nobody in any more, and ends what is under way."""
        with self._lock:
            self._closed.set()
            connections = self._all()
        for each in connections:
            shut_down(each)

    def stop(self, deadline_s: float) -> None:
        """Stops, and returns when no thread does anything here any more, or at the deadline."""
        self.shut()
        self._workers.stop(deadline_s)

    def _all(self) -> list[Any]:
        return [*self._open]

    def _answer_all(self, rank: int, sock: Any, reader: FrameReader) -> None:
        """Answers all that a rank asks over a connection; returns when that has ended."""
        try:
            with self._lock:
                self._open.add(sock)
            if not self._closed.is_set():
                reader.max_payload = 0
                self._answer_each(sock, frames_of(sock, reader))
        except ProtocolError as error:
            _log.warning("pulls: rank %d sent what is not of farspan: %s", rank, error)
        except (EOFError, OSError) as error:
            _log.debug("a reader has gone: %s", error)
        finally:
            with self._lock:
                self._open.discard(sock)

    def _answer_each(self, sock: Any, frames: Iterator[Frame]) -> None:
        while True:
            sock.settimeout(_IDLE_S)
            request = next(frames).header.get("pull")
            sock.settimeout(None)  # a reader that is stopped may go on one day
            if not isinstance(request, dict):
                raise ProtocolError("a question without a request")
            send_all(sock, self._answered(request))
            self.num_answered += 1

    def _answered(self, request: dict[str, Any]) -> list[Buffer]:
        try:
            return encode_answer(self._handler(request))
        except Exception as error:
            return encode({"error": described(error)})


class StreamListener(Answering):
    """Answers ranks that come by streams."""

    def __init__(self, side: SideChannel, handler: Handler) -> None:
        super().__init__(side, handler)
        assert side.streams is not None
        side.streams.serve(self._accept)

    def _accept(self, rank: int, stream: Any) -> None:
        self._workers.submit(lambda: self._serve(rank, stream))

    def _serve(self, rank: int, stream: Any) -> None:
        try:
            self._answer_all(rank, stream, FrameReader())
        finally:
            stream.close()


class Listener(Answering):
    """A rank's listening socket, and the connections that have come through it.

    Attributes:
        address: Where it listens.
    """

    def __init__(self, side: SideChannel, handler: Handler) -> None:
        super().__init__(side, handler)
        family = socket.getaddrinfo(side.address, 0, type=socket.SOCK_STREAM)[0][0]
        self._listener = adopt(
            socket.create_server((side.address, 0), family=family, backlog=max(_MAX_STRANGERS, side.world_size))
        )
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._strangers: dict[socket.socket, None] = {}
        self._max_strangers = max(_MAX_STRANGERS, side.world_size)
        self._num_warnings = 0
        self._workers.submit(self._accept)

    def _all(self) -> list[Any]:
        return [self._listener, *self._open, *self._strangers]

    def _accept(self) -> None:
        with self._listener:
            while not self._closed.is_set():
                try:
                    sock = adopt(self._listener.accept()[0])
                except OSError as error:  # shut; or no more files may be open
                    _log.debug("accept: %s", error)
                    self._closed.wait(_RETRY_S)
                    continue
                with self._lock:
                    if self._closed.is_set():
                        sock.close()
                        return
                    self._strangers[sock] = None
                    oldest = next(iter(self._strangers)) if len(self._strangers) > self._max_strangers else None
                if oldest is not None:
                    shut_down(oldest)
                self._workers.submit(lambda sock=sock: self._serve(sock))

    def _serve(self, sock: socket.socket) -> None:
        side = self._side
        try:
            try:
                rank, reader = admit(sock, side.rank, side.world_size, side.secret, service_of(side.rank))
            except ProtocolError as error:
                self._warn(error)
                return
            finally:
                with self._lock:
                    del self._strangers[sock]
            self._answer_all(rank, sock, reader)
        except (EOFError, OSError) as error:
            _log.debug("a reader has gone: %s", error)
        finally:
            sock.close()

    def _warn(self, error: ProtocolError) -> None:
        self._num_warnings += 1
        if self._num_warnings <= _MAX_WARNINGS:
            last = "; further strangers are not reported" if self._num_warnings == _MAX_WARNINGS else ""
            _log.warning("pulls: a stranger was refused: %s%s", error, last)


def shut_down(sock: Any) -> None:
    """Ends what any thread does with a socket or stream; that thread closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
