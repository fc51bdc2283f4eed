"""Runs the calls that come over all connections of one service, in the order in which they arrive.

    connections --a selector--> one thread: reads, runs, answers
                                  |   ^
    threads=n:                    v   |  n threads run, in no order; the one answers

Nothing waits for a caller that does not read: what it is to get is kept, and past a limit it is not read any more.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from farspan.control.wire import LOOK_S, Buffer, ProtocolError, advance, close_in_children
from farspan.errors import RecordError, ServiceError
from farspan.services.far import check_link
from farspan.services.messages import GREETING, SEND_BUFFER_BYTES, Message, MessageReader, error_message, result_message

__all__ = ["Server"]

_log = logging.getLogger(__name__)
_MOST_WAITING_BYTES = 64 << 20
"""Limit on what is kept for one caller, before nothing more of it is read."""
_MOST_CALLS = 1000
"""Limit on the calls of one caller that wait for a thread."""
_MOST_BUFFERS = 16
_SMALL_BYTES = 16 << 10
"""Answers below that are joined, so that many go out by one system call."""
_FLUSH_S = 0.001
"""How long an answer may wait for those to the calls that came with its own."""


class _Caller:
    """A connection with a process that calls."""

    def __init__(self, sock: socket.socket) -> None:
        self.is_far = sock.family != socket.AF_UNIX
        sock.setblocking(False)
        if not self.is_far:  # of TCP the system finds it by itself
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.sock = close_in_children(sock)
        self.messages = MessageReader()
        self.answers: list[Buffer] = []
        self.num_bytes = 0
        self.num_calls = 0
        """How many have come and have no answer yet, where threads run them."""
        self.events = selectors.EVENT_READ

    def add(self, buffers: list[Buffer]) -> None:
        self.answers += buffers
        self.num_bytes += sum(map(len, buffers))

    def send(self) -> None:
        """Sends as much as the system takes.

        Raises:
            OSError: The connection has ended.
        """
        with contextlib.suppress(BlockingIOError):
            self.answers = _joined(self.answers)
            while self.answers:
                sent = self.sock.sendmsg(self.answers[:_MOST_BUFFERS])
                self.num_bytes -= sent
                self.answers = advance(self.answers, sent)

    def wanted(self) -> int:
        """Returns the events to wait for."""
        reads = selectors.EVENT_READ if self.num_bytes < _MOST_WAITING_BYTES and self.num_calls < _MOST_CALLS else 0
        return reads | (selectors.EVENT_WRITE if self.answers else 0)


class Server:
    """The thread, or the threads, of one service.

    Args:
        name: Of the service.
        listener: Where callers connect.
        methods: What they may call, by name.
        num_threads: How many calls run at a time.
    """

    def __init__(
        self, name: str, listener: socket.socket, methods: Mapping[str, Callable[..., Any]], num_threads: int
    ) -> None:
        self._name = name
        self._listener = close_in_children(listener)
        self._listener.setblocking(False)
        self._methods = methods
        self._is_over = False
        self._wake, self._waker = map(close_in_children, socket.socketpair())
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._arrived: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._far: dict[_Caller, None] = {}
        """Callers of other hosts, which may be cut off."""
        self._look_at = 0.0
        self._calls: queue.SimpleQueue[tuple[_Caller, Message] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[_Caller, list[Buffer]]] = queue.SimpleQueue()
        self._runners = [
            threading.Thread(target=self._run_calls, name=f"farspan-{name}-{number}", daemon=True)
            for number in range(num_threads if num_threads > 1 else 0)
        ]
        self._thread = threading.Thread(target=self._serve, name=f"farspan-{name}", daemon=True)
        for thread in [*self._runners, self._thread]:
            thread.start()

    def close(self, deadline_s: float) -> None:
        """Ends all connections; returns when no call runs any more, or at the deadline."""
        until = time.monotonic() + deadline_s
        self._is_over = True
        self._wake_up()
        for _ in self._runners:
            self._calls.put(None)
        for thread in [*self._runners, self._thread]:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def take(self, sock: socket.socket) -> None:
        """Takes the connection of a caller of another host, which has proved that it is of the run; from any thread."""
        self._arrived.put(sock)
        self._wake_up()
        if self._is_over:  # its thread may not see it any more
            self._close_arrived()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # it is awake, or over
            self._waker.send(b"x")

    def _serve(self) -> None:
        try:
            while not self._is_over:
                for key, events in self._selector.select(LOOK_S if self._far else None):
                    if key.fileobj is self._listener:
                        with contextlib.suppress(OSError):  # it has gone already
                            self._add(self._listener.accept()[0])
                    elif key.fileobj is self._wake:
                        self._wake.recv(1 << 12)
                        self._take_arrived()
                        self._answer_done()
                    elif isinstance(key.data, _Caller):
                        self._attend(key.data, events)
                self._drop_cut_off()
        finally:
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
            self._selector.close()
            self._waker.close()
            self._close_arrived()

    def _close_arrived(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._arrived.get_nowait().close()

    def _take_arrived(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                sock = self._arrived.get_nowait()
                with contextlib.suppress(OSError):  # it has gone already
                    self._add(sock)

    def _add(self, sock: socket.socket) -> None:
        caller = _Caller(sock)
        caller.sock.send(GREETING)
        self._selector.register(caller.sock, caller.events, caller)
        if caller.is_far:
            self._far[caller] = None

    def _drop_cut_off(self) -> None:
        """Lets callers of hosts go that give no sign of life; looks once in a while."""
        if not self._far or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_S
        for caller in list(self._far):
            try:
                check_link(caller.sock)
            except TimeoutError as error:
                _log.warning("service %s: a caller is lost: %s", self._name, error.strerror)
                self._drop(caller)

    def _attend(self, caller: _Caller, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._take_in(caller)
            caller.send()
        except BlockingIOError:
            return
        except (EOFError, OSError, ProtocolError, RecordError, MemoryError) as error:
            if not isinstance(error, (EOFError, OSError)):
                _log.warning("service %s: a caller sent what is not of farspan: %s", self._name, error)
            self._drop(caller)
            return
        self._wait_for(caller)

    def _take_in(self, caller: _Caller) -> None:
        flushed = time.monotonic()
        for message in caller.messages.read(caller.sock):
            if self._runners:
                caller.num_calls += 1
                self._calls.put((caller, message))
                continue
            caller.add(self._run(message))
            if time.monotonic() > flushed + _FLUSH_S:
                caller.send()
                flushed = time.monotonic()

    def _run_calls(self) -> None:
        while (item := self._calls.get()) is not None:
            caller, message = item
            self._done.put((caller, self._run(message)))
            self._wake_up()

    def _answer_done(self) -> None:
        callers: dict[_Caller, None] = {}
        with contextlib.suppress(queue.Empty):
            while True:
                caller, buffers = self._done.get_nowait()
                caller.num_calls -= 1
                caller.add(buffers)
                callers[caller] = None
        for caller in callers:
            if caller.sock.fileno() >= 0:  # else it has gone meanwhile
                self._attend(caller, 0)

    def _wait_for(self, caller: _Caller) -> None:
        events = caller.wanted()
        if events != caller.events:
            caller.events = events
            self._selector.modify(caller.sock, events, caller)

    def _drop(self, caller: _Caller) -> None:
        self._selector.unregister(caller.sock)
        caller.sock.close()
        self._far.pop(caller, None)

    def _run(self, message: Message) -> list[Buffer]:
        """Returns the answer to one call."""
        number, name = message.header["id"], message.header.get("call")
        try:
            method = self._methods.get(name) if isinstance(name, str) else None
            if method is None:
                raise ServiceError(
                    f"there is no method {str(name)[:100]!r}.", why=f"there is {', '.join(sorted(self._methods))}."
                )
            args, kwargs = message.value()
            return result_message(number, str(name), method(*args, **kwargs))
        except BaseException as error:  # whatever it is, it is the caller's
            _log.debug("service %s: %s raised", self._name, name, exc_info=True)
            return error_message(number, error)


def _joined(buffers: list[Buffer]) -> list[Buffer]:
    """Returns the same bytes in fewer buffers."""
    if len(buffers) < 2:
        return buffers
    found: list[Buffer] = []
    small: list[Buffer] = []
    for buffer in buffers:
        if len(buffer) < _SMALL_BYTES:
            small.append(buffer)
            continue
        if small:
            found.append(b"".join(small))
            small = []
        found.append(buffer)
    return [*found, b"".join(small)] if small else found
