"""Calls from other hosts: each service listens at a TCP port too, and both ends prove that they know the secret of the
run before anything else is said.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable

from farspan.control.wire import LINK_SILENT_S, adopt, close_in_children, is_of_link, silence_s
from farspan.launch.tcp.listening import listen_everywhere
from farspan.launch.tcp.secret import prove

__all__ = ["Port", "check_link", "connect_to_port", "is_cut"]

_log = logging.getLogger(__name__)
_PROVING_S = 10.0
"""How long the other end may take to prove itself, and a host to answer at all."""
_RETRY_S = 0.1
_MOST_STRANGERS = 128
"""Connections that have not proven who they are yet; the oldest goes when one more comes."""


class Port:
    """Where a service listens for callers of other hosts.

    Args:
        service: Its name.
        secret: What those know who are let in; not empty.

    Attributes:
        number: Of the port, on all addresses of this host.
    """

    def __init__(self, service: str, secret: str) -> None:
        self._service = service
        self._secret = secret
        self._listener = close_in_children(listen_everywhere())
        self.number = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}
        self._is_closed = threading.Event()

    def open(self, take: Callable[[socket.socket], None]) -> None:
        """Lets callers in from now on.

        Args:
            take: Called, in a thread for each, with the connection of one that has proved that it knows the secret.
        """
        threading.Thread(target=self._accept, args=(take,), name=f"farspan-{self._service}-port", daemon=True).start()

    def close(self) -> None:
        """Lets nobody in any more."""
        with self._lock:
            self._is_closed.set()
            for each in (self._listener, *self._strangers):
                with contextlib.suppress(OSError):  # it has ended by itself
                    each.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self, take: Callable[[socket.socket], None]) -> None:
        while True:
            try:
                link = adopt(self._listener.accept()[0])
            except OSError as error:  # closed; or no more files may be open
                if self._is_closed.wait(_RETRY_S):
                    return
                _log.debug("service %s: accept: %s", self._service, error)
                continue
            with self._lock:
                if self._is_closed.is_set():
                    link.close()
                    return
                if len(self._strangers) == _MOST_STRANGERS:
                    with contextlib.suppress(OSError):  # it has ended by itself
                        next(iter(self._strangers)).shutdown(socket.SHUT_RDWR)
                self._strangers[link] = None
            threading.Thread(target=self._let_in, args=(link, take), daemon=True).start()

    def _let_in(self, link: socket.socket, take: Callable[[socket.socket], None]) -> None:
        own, other = _ends_of(self._service)
        try:
            link.settimeout(_PROVING_S)
            prove(link, self._secret.encode(), own, other)
            link.settimeout(None)
        except OSError as error:
            _log.warning("service %s: a stranger was not let in: %s", self._service, error)
            link.close()
            return
        finally:
            with self._lock:
                del self._strangers[link]
        take(link)


def connect_to_port(service: str, address: tuple[str, int], secret: str, limit_s: float) -> socket.socket:
    """Returns a connection with the process that has a service on another host.

    Args:
        service: Its name.
        address: Where it listens.
        secret: Of the run.
        limit_s: The longest wait.

    Raises:
        ConnectionError: It does not listen there any more, or somebody else does.
        OSError: The host does not answer (`is_cut`).
    """
    until = time.monotonic() + min(limit_s, _PROVING_S)
    link = adopt(socket.create_connection(address, timeout=_left(until)))
    try:
        link.settimeout(_left(until))
        prove(link, secret.encode(), *reversed(_ends_of(service)))
        link.settimeout(None)
    except BaseException:
        link.close()
        raise
    return link


def is_cut(error: OSError) -> bool:
    """Returns whether an error means that the link to the other host is cut, rather than that the process has ended."""
    return isinstance(error, TimeoutError) or is_of_link(error)


def check_link(link: socket.socket) -> None:
    """Looks whether the other host still gives signs of life; to be called where nothing has come for a while.

    Raises:
        TimeoutError: It does not.
    """
    if silence_s(link) > LINK_SILENT_S:
        why = f"nothing has come from its host for {LINK_SILENT_S:g} s: the link is cut, or the host is down"
        raise TimeoutError(errno.ETIMEDOUT, why)


def _ends_of(service: str) -> tuple[bytes, bytes]:
    """As what the process that has a service, and one that calls it, prove that they know the secret."""
    return f"service {service}".encode(), f"caller of {service}".encode()


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())
