"""What a rank asks the keeper of another host."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Self

from farspan.launch.memory.wire import CHUNK_BYTES, KEEPER, RANK, Message, receive, send
from farspan.launch.tcp.exact import receive_into
from farspan.launch.tcp.secret import prove

__all__ = ["KeeperClient", "RefusedError"]


class RefusedError(OSError):
    """A keeper cannot do what it was asked for; says why."""


class KeeperClient:
    """A connection with a keeper; to be used as a context.

    Args:
        address: Where it listens.
        secret: Of the run.
        deadline_s: How long it may be silent.

    Raises:
        OSError: It is not there, or does not know the secret.
    """

    def __init__(self, address: tuple[str, int], secret: str, *, deadline_s: float) -> None:
        self._link = socket.create_connection(address, timeout=deadline_s)
        try:
            self._link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            prove(self._link, secret.encode(), RANK, KEEPER)
        except BaseException:
            self._link.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._link.close()

    def put(self, path: str, file: int, size: int, on_progress: Callable[[], object]) -> None:
        """Writes a file there.

        Args:
            path: Of the new file.
            file: An open file that has its data.
            size: So many bytes.
            on_progress: Called every now and then.
        """
        send(self._link, {"do": "put", "path": path, "size": size})
        at = 0
        with os.fdopen(file, "rb", closefd=False) as data:
            while at < size:
                on_progress()
                count = self._link.sendfile(data, at, min(size - at, 16 * CHUNK_BYTES))
                if count == 0:
                    raise ConnectionError("the file has become shorter")
                at += count
        self._answer()

    def put_bytes(self, path: str, data: bytes) -> None:
        """Writes a small file there."""
        send(self._link, {"do": "put", "path": path, "size": len(data)})
        self._link.sendall(data)
        self._answer()

    def get(self, path: str, write: Callable[[memoryview], object]) -> None:
        """Gives the data of a file there to `write`, piece by piece.

        Raises:
            RefusedError: There is no such file.
        """
        send(self._link, {"do": "get", "path": path})
        left = int(self._answer()["size"])
        buffer = memoryview(bytearray(min(left, CHUNK_BYTES)))
        while left:
            part = buffer[: min(left, CHUNK_BYTES)]
            receive_into(self._link, part)
            write(part)
            left -= len(part)

    def names(self, path: str) -> list[str]:
        """Returns what is in a folder there."""
        send(self._link, {"do": "names", "path": path})
        return [str(name) for name in self._answer()["names"]]

    def rename(self, path: str, to: str) -> None:
        """Gives a file or a folder there another name."""
        send(self._link, {"do": "rename", "path": path, "to": to})
        self._answer()

    def remove(self, path: str) -> None:
        """Removes a file or a folder there."""
        send(self._link, {"do": "remove", "path": path})
        self._answer()

    def _answer(self) -> Message:
        found = receive(self._link)
        if "error" in found:
            raise RefusedError(str(found["error"]))
        return found
