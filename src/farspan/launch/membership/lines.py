"""Lines of JSON over a Unix socket in the folder of a run, which only this user can enter."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, cast

__all__ = ["Lines", "Message", "connect_to", "listen_in", "socket_to"]

Message = dict[str, Any]

_NAME = "members"
_LONGEST_LINE = 1 << 20
_CHUNK_BYTES = 1 << 16
_MOST_FILES = 2
_SEND_S = 2
"""How long the other end may take to accept a line: who is stopped must not stop who writes to it."""


class Lines:
    """One end of a connection; any thread may send, one receives.

    Attributes:
        files: Numbers of open files that have come with the messages so far, for who receives to take.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _SEND_S, 0))
        self._buffer = bytearray()
        self._lock = threading.Lock()
        self.files: list[int] = []

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """Sends a message; who does not accept it is gone, which `receive` says, not this.

        Args:
            message: JSON.
            files: Numbers of open files that go with it.
        """
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            try:
                sent = socket.send_fds(self._sock, [data], files) if files else 0
                self._sock.sendall(data[sent:])
            except OSError:
                self.close()

    def receive(self) -> Message:
        """Returns the next message.

        Raises:
            EOFError: The other end has closed, or says what is no message.
        """
        while (end := self._buffer.find(b"\n")) < 0:
            try:
                data, files, _, _ = socket.recv_fds(self._sock, _CHUNK_BYTES, _MOST_FILES)
            except OSError:
                raise EOFError from None
            self.files += files
            if not data or len(self._buffer) > _LONGEST_LINE:
                raise EOFError
            self._buffer += data
        try:
            message = json.loads(self._buffer[:end])
        except (ValueError, RecursionError):
            raise EOFError from None
        del self._buffer[: end + 1]
        if not isinstance(message, dict):
            raise EOFError
        return cast("Message", message)

    def close(self) -> None:
        """Ends the connection; the other end, and who receives here, hear of it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _path_in(folder: str, name: str) -> Generator[str]:
    """Gives a path of the socket that is short enough for one, however long that of the folder is."""
    path = str(Path(folder) / name)
    if not os.path.isdir("/proc/self/fd"):
        yield path
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def listen_in(folder: str, name: str = _NAME) -> socket.socket:
    """Returns a socket to which those can connect that can enter the folder."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _path_in(folder, name) as path:
        listener.bind(path)
    listener.listen(128)
    return listener


def socket_to(folder: str, name: str = _NAME) -> socket.socket:
    """Returns a connection with who listens in the folder under a name.

    Raises:
        OSError: Nobody does.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _path_in(folder, name) as path:
            sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock


def connect_to(folder: str) -> Lines:
    """Returns a connection with who listens in the folder.

    Raises:
        OSError: Nobody does.
    """
    return Lines(socket_to(folder))
