"""The calls that one process has under way to another: sent at once, answered in any order."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from farspan.control.wire import LOOK_S, ProtocolError, close_in_children, send_all
from farspan.errors import DeadlineError, FarspanError, RecordError, ServiceError
from farspan.launch.rank.process_end import at_process_end
from farspan.services.far import check_link
from farspan.services.messages import SEND_BUFFER_BYTES, Message, MessageReader, call_message
from farspan.services.names import Place

__all__ = ["Connection"]

_ENDING_S = 5.0


class Connection:
    """A connection with the process that has a service.

    Args:
        sock: Connected.
        name: Of the service.
        place: Where it is, and who has it.
        timeout_s: How long that process may take no calls in before the connection is given up.
    """

    def __init__(self, sock: socket.socket, name: str, place: Place, timeout_s: float) -> None:
        self.name = name
        self.who = place.who
        self.process = os.getpid()
        self._timeout_s = timeout_s
        self._sock = close_in_children(sock)
        whole = int(timeout_s)
        self._sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", whole, int((timeout_s - whole) * 1e6))
        )
        if not place.address:  # of TCP the system finds it by itself
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        else:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(LOOK_S), 0))
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._under_way: dict[int, tuple[str, Future[Any]]] = {}
        self._lost: str | None = None
        self._thread = threading.Thread(target=self._listen, name=f"farspan-service-{name}", daemon=True)
        self._thread.start()
        _open.add(self)

    @property
    def is_lost(self) -> bool:
        """Returns whether nothing comes over it any more."""
        return self._lost is not None

    def call(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Future[Any]:
        """Sends a call, and returns where its result comes.

        Raises:
            RecordError: An argument cannot be sent.
            ServiceError: The other process is gone.
            DeadlineError: It takes nothing in.
        """
        number = next(self._numbers)
        buffers = call_message(number, method, args, kwargs)
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # what is sent cannot be taken back
        with self._lock:
            if self._lost is not None:
                raise self._loss(method, self._lost)
            self._under_way[number] = method, future
        try:
            with self._sending:
                send_all(self._sock, buffers)
        except BlockingIOError:
            self._end(f"it has taken nothing in for {self._timeout_s:g} s")
            raise DeadlineError(
                f"the service {self.name!r} of {self.who} takes no more calls.",
                why=f"it has taken nothing in for {self._timeout_s:g} s: the call of {method} could not be sent.",
                hint="wait for results before you send more; look where that process is (py-spy dump)",
            ) from None
        except OSError as error:
            self._end(error.strerror or str(error))
        return future

    def close(self) -> None:
        """Ends the connection, and all calls that are under way; returns when its thread has ended."""
        self._end("this process has closed it")
        self._thread.join(_ENDING_S)

    def _listen(self) -> None:
        reader = MessageReader()
        try:
            while True:
                try:
                    messages = reader.read(self._sock)
                except BlockingIOError:  # from another host nothing has come for LOOK_S
                    check_link(self._sock)
                    continue
                for message in messages:
                    self._take(message)
        except (EOFError, ConnectionError):
            self._end("its process has ended, or has closed the service")
        except TimeoutError as error:
            self._end(error.strerror or str(error))
        except (OSError, ProtocolError, RecordError) as error:
            self._end(f"{type(error).__name__}: {error}")
        finally:
            self._sock.close()

    def _take(self, message: Message) -> None:
        with self._lock:
            method, future = self._under_way.pop(message.header["id"], ("", None))
        if future is None:
            raise ProtocolError("an answer to no call")
        error = message.header.get("error")
        if error is not None:
            future.set_exception(self._raised(method, error))
            return
        try:
            result = message.value()
        except RecordError as problem:
            future.set_exception(problem)
            return
        future.set_result(result)

    def _end(self, why: str) -> None:
        with self._lock:
            self._lost = self._lost or why
            under_way, self._under_way = self._under_way, {}
        with contextlib.suppress(OSError):  # it has ended already
            self._sock.shutdown(socket.SHUT_RDWR)
        for method, future in under_way.values():
            future.set_exception(self._loss(method, why))

    def _loss(self, method: str, why: str) -> FarspanError:
        error = ServiceError(
            f"the service {self.name!r} of {self.who} is lost while {method} is called.",
            why=f"{why}; whether the call was run is not known.",
            hint="call again: the next call waits until a process exposes that name",
        )
        error.is_loss = True
        return error

    def _raised(self, method: str, said: Any) -> ServiceError:
        texts = {key: str(value) for key, value in said.items()} if isinstance(said, dict) else {}
        error = ServiceError(
            f"{method} of the service {self.name!r} of {self.who} raised {texts.get('what', 'an error')}",
            why=texts.get("why", ""),
            hint=texts.get("hint", ""),
        )
        error.remote_type, error.remote_traceback = texts.get("type", ""), texts.get("traceback", "")
        return error


_open: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_all() -> None:
    """A thread that is still in torch when the interpreter ends would abort the process."""
    for connection in list(_open):
        if connection.process == os.getpid():
            connection.close()


at_process_end(_close_all)
