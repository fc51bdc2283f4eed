"""Moves all MPI messages of one process: whoever waits for a transfer looks after them, else one thread does.

    small messages    control plane and pulls: one communicator, any source; each goes to the box of its tag
    tensors, sums     requests that a transport has begun, tested until they are over

MPI has no event to sleep on: no descriptor, no callback, and a blocking wait of Open MPI spins. So both look and pause
in turns. A pause is short after something has happened, and the longer the longer nothing has. The thread's are long,
for a look takes time from what the rank computes, but while the program waits for a message (`hurrying`). Figures are
in docs/design/2026-11-25-mpi.md and 2026-11-28-mpi-hurries-for-who-waits.md.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from farspan.comm.transport import TransferError

__all__ = ["Box", "Posted", "Progress"]

Box = Callable[[int, bytearray], None]
"""Takes a message: who has sent it, what. Called by whichever thread looks after messages; must not block."""

_SPIN_S = 40e-6
"""How long a wait looks again and again before it pauses: about what waking up costs."""
_WAITED_FOR, _ALONE = (30e-6, 300e-6), (1e-3, 8e-3)
"""The shortest and the longest pause while the program waits, and while it computes, from which each look takes time.
The first one comes after something has come, ended or begun; each is half as long again as the one before.
"""
_ENDING_S = 1.0
"""How long `close` waits for what is still on its way."""
_leaked: list[Posted] = []
"""Transfers that nobody ends any more: MPI may use their memory until the process ends."""


class _Owner(Protocol):
    """Who has begun a transfer."""

    is_aborted: bool


class Posted:
    """A transfer: requests of MPI that are over together.

    Args:
        progress: What looks after it.
        requests: In the order in which they are to be tested.
        sizes: The bytes that each of them is to bring; empty for a send.
        memory: What MPI reads or writes until it is over.
        owner: Whose abort ends it.
        peer: The rank at the other end, for people.
    """

    __slots__ = ("error", "is_over", "memory", "owner", "peer", "progress", "requests", "sizes")

    def __init__(
        self, progress: Progress, requests: Sequence[Any], sizes: Sequence[int], memory: Any, owner: _Owner, peer: int
    ) -> None:
        self.progress = progress
        self.requests = deque(requests)
        self.sizes = deque(sizes)
        self.memory = memory
        self.owner = owner
        self.peer = peer
        self.is_over = False
        self.error = ""

    def is_done(self) -> bool:
        if not self.is_over:
            self.progress.look()
        return self.is_over

    def wait(self, deadline_s: float) -> None:
        if not self.is_over:
            self.progress.wait(self, deadline_s)
        if self.error:
            raise TransferError(self.error)

    def test(self, mpi: Any) -> bool:
        """Returns whether all requests are over; the progress lock is held."""
        status = mpi.Status()
        while self.requests:
            try:
                if not self.requests[0].Test(status):
                    return False
            except mpi.Exception as error:
                self._fail(f"the transfer with rank {self.peer} broke: {error.Get_error_string()}")
            else:
                count = status.Get_count(mpi.BYTE) if self.sizes else 0
                if self.sizes and count != self.sizes.popleft():
                    self._fail(f"rank {self.peer} sent {count} bytes where another number was to be received")
            self.requests.popleft()
        self.memory = None
        self.is_over = True
        return True

    def abort(self, mpi: Any) -> None:
        """End it for who waits; the progress lock is held. MPI may still use its memory: `test` goes on."""
        self._fail("connection aborted")
        if self.sizes:
            for request in self.requests:
                request.Cancel()
        self.sizes.clear()
        self.is_over = True

    def _fail(self, error: str) -> None:
        self.error = self.error or error


class _Arriving:
    """A message of the common communicator that is being received."""

    __slots__ = ("data", "request", "tag")

    def __init__(self, tag: int, data: bytearray, request: Any) -> None:
        self.tag, self.data, self.request = tag, data, request


class Progress:
    """All that is on its way to and from this process.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: The communicator of small messages; of farspan alone.

    Attributes:
        rank: Of this process in that communicator.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self.mpi = mpi
        self.rank: int = comm.Get_rank()
        self._comm = comm
        self._lock = threading.Lock()
        """Held by the thread that looks."""
        self._posted: list[Posted] = []
        self._arriving: dict[int, deque[_Arriving]] = {}
        """The messages that are being received, by source and in the order in which they were sent."""
        self._boxes: dict[int, Box] = {}
        self._early: dict[int, list[tuple[int, bytearray]]] = {}
        """Messages whose box is not open yet, by tag."""
        self._status = mpi.Status()
        self.is_aborted = False
        self._is_closing = False
        self._wake = threading.Event()
        self._waiting = threading.Lock()
        self._num_waiting = 0
        """How many threads of the program wait for what the thread brings."""
        self._thread = threading.Thread(target=self._run, name="farspan-mpi", daemon=True)
        self._thread.start()

    def open(self, tag: int, box: Box) -> None:
        """Give a box all messages of a tag, those too that have come already."""
        with self._lock:
            for source, data in self._early.pop(tag, ()):
                box(source, data)
            self._boxes[tag] = box

    def post(self, rank: int, tag: int, data: bytes | bytearray) -> Posted | None:
        """Begin to send a small message; to oneself, it is there at once.

        Returns:
            The transfer; None if there is nothing to wait for.
        """
        if rank == self.rank:
            box = self._boxes.get(tag)
            assert box is not None
            box(rank, bytearray(data))
            return None
        request = self._comm.Isend([data, self.mpi.BYTE], rank, tag)
        return self.begin(Posted(self, [request], (), data, self, rank))

    def begin(self, posted: Posted) -> Posted:
        """Look after a transfer from now on."""
        self._posted.append(posted)
        self._wake.set()
        return posted

    def abort(self, owner: _Owner) -> None:
        """End the transfers of an owner, and those that it begins at this moment; from any thread."""
        with self._lock:
            owner.is_aborted = True
            for posted in list(self._posted):
                if posted.owner is owner and not posted.is_over:
                    posted.abort(self.mpi)

    def wait(self, posted: Posted, deadline_s: float) -> None:
        """Return when a transfer is over, looking after all of them meanwhile.

        Raises:
            TimeoutError: It is not in time.
        """
        now = time.monotonic()
        end, spin_end, pause_s = now + deadline_s, now + _SPIN_S, 0.0
        while not posted.is_over:
            self.look()
            if posted.is_over:
                return
            now = time.monotonic()
            if now >= end:
                raise TimeoutError(f"a transfer with rank {posted.peer} has not ended in {deadline_s:g} s")
            if now >= spin_end:
                pause_s = _next_pause_s(pause_s, _WAITED_FOR)
                time.sleep(min(pause_s, end - now))  # nothing in MPI can be waited for without a core

    @contextlib.contextmanager
    def hurrying(self) -> Iterator[None]:
        """Lets the thread look as often as who waits for a transfer: the program waits for what it brings."""
        with self._waiting:
            self._num_waiting += 1
        self._wake.set()
        try:
            yield
        finally:
            with self._waiting:
                self._num_waiting -= 1

    def look(self) -> bool:
        """Take what has come, and see what has ended; returns whether there was anything. Waits for nothing."""
        if not self._lock.acquire(blocking=False):
            return False  # another thread does so
        try:
            has_done = self._end_posted()
            has_done |= self._receive()
            return has_done
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the thread: no call of MPI comes from here afterwards."""
        end = time.monotonic() + _ENDING_S
        while self._posted and time.monotonic() < end:
            self.look()
            time.sleep(_WAITED_FOR[1])
        self._is_closing = True
        self._wake.set()
        self._thread.join()
        _leaked.extend(self._posted)

    def _end_posted(self) -> bool:
        has_done = False
        for posted in list(self._posted):
            if posted.owner.is_aborted and not posted.is_over:
                posted.abort(self.mpi)
            if posted.test(self.mpi):
                self._posted.remove(posted)
                has_done = True
        return has_done

    def _receive(self) -> bool:
        mpi, has_done = self.mpi, False
        while (message := self._comm.Improbe(mpi.ANY_SOURCE, mpi.ANY_TAG, self._status)) is not None:
            source, tag = self._status.Get_source(), self._status.Get_tag()
            data = bytearray(self._status.Get_count(mpi.BYTE))
            arriving = _Arriving(tag, data, message.Irecv([data, mpi.BYTE]))
            self._arriving.setdefault(source, deque()).append(arriving)
        for source, queue in list(self._arriving.items()):
            while queue and queue[0].request.Test():
                first = queue.popleft()
                has_done = True
                self._give(first.tag, source, first.data)
            if not queue:
                del self._arriving[source]
        return has_done

    def _give(self, tag: int, source: int, data: bytearray) -> None:
        box = self._boxes.get(tag)
        if box is None:
            self._early.setdefault(tag, []).append((source, data))
        else:
            box(source, data)

    def _run(self) -> None:
        pause_s = 0.0
        while not self._is_closing:
            if self.look():
                pause_s = 0.0
                continue
            self._wake.clear()
            pause_s = _next_pause_s(pause_s, _WAITED_FOR if self._num_waiting else _ALONE)
            if self._wake.wait(pause_s):
                pause_s = 0.0


def _next_pause_s(pause_s: float, bounds: tuple[float, float]) -> float:
    shortest_s, longest_s = bounds
    return min(max(1.5 * pause_s, shortest_s), longest_s)
