"""What farspan uses of mpi4py, in memory: ranks are threads of one process, and a message is matched as MPI says.

Messages of at most EAGER_BYTES end their send at once; longer ones when they are received.
"""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["EAGER_BYTES", "FakeComm", "FakeMpi"]

EAGER_BYTES = 64
_TRUNCATED = "MPI_ERR_TRUNCATE: message truncated"


class _Status:
    def __init__(self) -> None:
        self.source, self.tag, self.count = -1, -1, 0

    def Get_source(self) -> int:  # noqa: N802  the names are MPI's
        return self.source

    def Get_tag(self) -> int:  # noqa: N802
        return self.tag

    def Get_count(self, datatype: str) -> int:  # noqa: N802
        return self.count


class _MpiError(RuntimeError):
    def Get_error_string(self) -> str:  # noqa: N802
        return str(self)


class _Request:
    def __init__(self, world: _World, buffer: Any = None) -> None:
        self.world, self.buffer = world, buffer
        self.is_over, self.is_cancelled, self.count, self.error = False, False, 0, ""

    def Test(self, status: _Status | None = None) -> bool:  # noqa: N802
        with self.world.lock:
            if self.is_over and self.error:
                error, self.error = self.error, ""
                raise _MpiError(error)
            if status is not None:
                status.count = self.count
            return self.is_over

    def Cancel(self) -> None:  # noqa: N802
        with self.world.lock:
            for queue in self.world.posted.values():
                queue[:] = [each for each in queue if each[2] is not self]
            self.is_cancelled = self.is_over = True

    def put(self, data: bytes) -> None:
        """A message has been matched with this receive."""
        self.is_over, self.count = True, len(data)
        if len(data) > len(self.buffer):
            self.error = _TRUNCATED
        elif data:
            self.buffer[: len(data)] = data


class _Message:
    def __init__(self, world: _World, data: bytes, sending: _Request) -> None:
        self.world, self.data, self.sending = world, data, sending

    def Irecv(self, buffer: Any) -> _Request:  # noqa: N802
        request = _Request(self.world, memoryview(buffer[0]).cast("B"))
        with self.world.lock:
            request.put(self.data)
            self.sending.is_over = True
        return request


class _World:
    """What the communicators of all ranks share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sent: dict[tuple[object, int], list[tuple[int, int, bytes, _Request]]] = {}
        """By communicator and destination: source, tag, content and the send of what nobody has received."""
        self.posted: dict[tuple[object, int], list[tuple[int, int, _Request]]] = {}
        """By communicator and rank: source, tag and request of receives without a message."""


class FakeComm:
    """A communicator of `size` ranks, as `rank` sees it."""

    def __init__(self, world: _World, key: object, rank: int, size: int) -> None:
        self._world, self._key, self._rank, self._size = world, key, rank, size

    def Get_rank(self) -> int:  # noqa: N802
        return self._rank

    def Get_size(self) -> int:  # noqa: N802
        return self._size

    def Isend(self, buffer: Any, dest: int, tag: int) -> _Request:  # noqa: N802
        data = b"" if buffer[0] is None else bytes(memoryview(buffer[0])[: _count(buffer)])
        request = _Request(self._world)
        with self._world.lock:
            request.is_over = len(data) <= EAGER_BYTES
            queue = self._world.posted.setdefault((self._key, dest), [])
            for number, (source, wanted, receiving) in enumerate(queue):
                if (source, wanted) == (self._rank, tag):
                    del queue[number]
                    receiving.put(data)
                    request.is_over = True
                    return request
            self._world.sent.setdefault((self._key, dest), []).append((self._rank, tag, data, request))
        return request

    def Irecv(self, buffer: Any, source: int, tag: int) -> _Request:  # noqa: N802
        memory = memoryview(b"" if buffer[0] is None else buffer[0]).cast("B")
        request = _Request(self._world, memory)
        with self._world.lock:
            queue = self._world.sent.setdefault((self._key, self._rank), [])
            for number, (src, sent_tag, data, sending) in enumerate(queue):
                if (src, sent_tag) == (source, tag):
                    del queue[number]
                    request.put(data)
                    sending.is_over = True
                    return request
            self._world.posted.setdefault((self._key, self._rank), []).append((source, tag, request))
        return request

    def Improbe(self, source: int, tag: int, status: _Status) -> _Message | None:  # noqa: N802
        assert source == tag == -1
        with self._world.lock:
            queue = self._world.sent.setdefault((self._key, self._rank), [])
            if not queue:
                return None
            status.source, status.tag, data, sending = queue.pop(0)
            status.count = len(data)
        return _Message(self._world, data, sending)


class FakeMpi:
    """The module, and the communicators of its ranks."""

    ANY_SOURCE = ANY_TAG = -1
    BYTE = "byte"
    Status = _Status
    Exception = _MpiError
    Comm = FakeComm

    def __init__(self) -> None:
        self._world = _World()

    def comms(self, size: int) -> list[FakeComm]:
        """A new communicator, as each of its ranks sees it."""
        key = object()
        return [FakeComm(self._world, key, rank, size) for rank in range(size)]


def _count(buffer: Any) -> int | None:
    return buffer[1] if len(buffer) == 3 else None
