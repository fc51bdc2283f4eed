"""What a caller holds of another process's object: its methods, by name."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from socket import socket
from typing import Any

from farspan import settings
from farspan.errors import DeadlineError, LaunchError, quoted
from farspan.launch.membership.lines import socket_to
from farspan.launch.roles.role import describe_process
from farspan.services.connection import Connection
from farspan.services.far import connect_to_port, is_cut
from farspan.services.messages import GREETING
from farspan.services.names import Names, Place, names_of_run

__all__ = ["Service", "service"]

_RETRY_S = 1.0


class Service:
    """The methods of an object of another process: `service.add(x)` returns the result, `service.future.add(x)` a
    `concurrent.futures.Future` of it.

    If that process ends, calls that are under way raise, and the next call waits for a process that exposes the name.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._connected()

    @property
    def future(self) -> Futures:
        """Returns the same methods, whose calls return at once."""
        return Futures(self)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._result(method, self._send(method, args, kwargs))

        return call

    def __repr__(self) -> str:
        return f"farspan.service({self._name!r})"

    def _send(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        return self._connected().call(method, args, kwargs)

    def _result(self, method: str, future: Future[Any]) -> Any:
        try:
            return future.result(self._timeout_s)
        except FutureTimeoutError:
            if future.done():  # it is the method's own
                raise
        who = self._connection.who if self._connection is not None else "the process that has it"
        raise self._late(f"run {method}", who)

    def _late(self, to_do: str, who: str) -> DeadlineError:
        return DeadlineError(
            f"{describe_process()} waited {self._timeout_s:g} s for the service {self._name!r} to {to_do}.",
            why=f"{who} has not answered: it runs other calls, or is stopped.",
            hint="farspan.service(name, timeout=seconds); `.future` for calls that take long",
        )

    def _connected(self) -> Connection:
        found = self._connection
        if found is not None and not found.is_lost and found.process == os.getpid():
            return found
        with self._lock:
            found = self._connection
            if found is None or found.is_lost or found.process != os.getpid():
                found = self._connection = self._connect()
            return found

    def _connect(self) -> Connection:
        names, dead, until = names_of_run(), "", time.monotonic() + self._timeout_s
        while True:  # each time another one is dead, or its link is cut
            place = names.find(self._name, self._timeout_s, dead)
            try:
                return Connection(self._open(names, place), self._name, place, self._timeout_s)
            except (ConnectionError, FileNotFoundError):
                dead = place.socket
            except OSError as error:
                if not (place.address and is_cut(error)):
                    raise
                dead = ""
                self._wait_past_cut(names, place, until)

    def _open(self, names: Names, place: Place) -> socket:
        """Returns a connection that the other process has taken.

        Raises:
            OSError: It has ended, or its host does not answer.
            DeadlineError: It does not take it.
        """
        with contextlib.ExitStack() as stack:
            if place.address:
                address = place.address, place.port
                sock = connect_to_port(self._name, address, settings.text("SECRET"), self._timeout_s)
            else:
                sock = socket_to(names.folder, place.socket)
            stack.callback(sock.close)
            self._greet(sock, place.who)
            stack.pop_all()
        return sock

    def _wait_past_cut(self, names: Names, place: Place, until: float) -> None:
        """Waits until another process has the name, or for a while: nothing tells when a link is there again.

        Raises:
            DeadlineError: There is no time left.
        """
        if time.monotonic() > until:
            raise DeadlineError(
                f"{describe_process()} waited {self._timeout_s:g} s for a way to the service {self._name!r}.",
                why=f"{place.who} has it, and does not answer at {place.address}:{place.port}.",
                hint="a firewall? farspan doctor --hosts ... tries all ways between hosts",
            )
        with contextlib.suppress(DeadlineError):
            names.find(self._name, _RETRY_S, place.socket)

    def _greet(self, sock: socket, who: str) -> None:
        """Waits until the other process has taken the connection.

        Raises:
            ConnectionError: It has ended.
            DeadlineError: It does not.
        """
        sock.settimeout(self._timeout_s)
        try:
            greeting = sock.recv(len(GREETING))
        except TimeoutError:
            raise self._late("let this process in", who) from None
        if greeting != GREETING:
            raise ConnectionError("closed")
        sock.settimeout(None)


class Futures:
    """The methods of a service, whose calls return a `concurrent.futures.Future`; what it calls back runs in a thread
    of farspan's.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def __getattr__(self, method: str) -> Callable[..., Future[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        send = self._service._send  # pyright: ignore[reportPrivateUsage]

        def call(*args: Any, **kwargs: Any) -> Future[Any]:
            return send(method, args, kwargs)

        return call


def service(name: str, *, timeout: float | None = None) -> Service:
    """Returns the object that another process of the run has exposed under a name, once it has.

    Args:
        name: Given to `farspan.expose`.
        timeout: Seconds to wait for it, and for the result of a call; None: FARSPAN_DEADLINE, or 300.

    Raises:
        DeadlineError: Nobody has exposed it in time.
        ServiceError: Nobody has, and the run has no other processes.
        LaunchError: The launcher does not answer.

    Example:
        >>> import farspan
        >>> exposed = farspan.expose("numbers", [3, 1], methods=["append", "count"])
        >>> numbers = farspan.service("numbers", timeout=10)
        >>> numbers.append(1), numbers.count(1)
        (None, 2)
        >>> exposed.close()
    """
    if not isinstance(name, str):
        raise LaunchError(
            f"{quoted(name)} is no name of a service.", why="it is a text.", hint='farspan.service("buffer")'
        )
    timeout_s = settings.seconds("DEADLINE", default=300.0) if timeout is None else float(timeout)
    if not 0.0 < timeout_s < threading.TIMEOUT_MAX:
        why = "it is how long the name, and each result, is waited for."
        raise LaunchError(f"timeout={timeout_s:g} is no number of seconds above 0.", why=why, hint="timeout=60")
    return Service(name, timeout_s)
