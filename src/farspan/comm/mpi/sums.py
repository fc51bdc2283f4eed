"""Sums over a few ranks by messages between two of them, with the bits that gloo's sums have.

MPI's own reductions add up in an order that is the implementation's to choose, and may be another one the next time.
Here, as in gloo, a tensor is cut into one block for each rank, and each block goes once round the ring of ranks:

    block b    begins at rank b - 1, as that rank has it
               goes down: b - 2 adds its own, b - 3, ... , and last rank b
               goes down once more, added up, to all others

So the order of a block's sum depends on the size of the tensor and the number of ranks, on nothing else. The blocks are
those of gloo's ring (allreduce.cc): the bits are those that the same ranks have over gloo.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from farspan.comm.mpi.transport import MpiTransport
from farspan.comm.transport import TransferError

__all__ = ["MpiCollectives", "block_bounds"]

_TAG = 0
_MOST_SEGMENT_BYTES = 1 << 20
"""gloo's `maxSegmentSize`."""
_NO_LIMIT_S = 1e9


class _Pending:
    """A collective that is under way, or waits for those before it."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def is_done(self) -> bool:
        return self._ended.is_set()

    def wait(self, deadline_s: float) -> None:
        if not self._ended.wait(deadline_s):
            raise TimeoutError(f"a sum has not ended in {deadline_s:g} s")
        if self._error is not None:
            raise TransferError(str(self._error)) from self._error

    def end(self, error: BaseException | None) -> None:
        self._error = error
        self.run = _nothing
        self._ended.set()


class MpiCollectives:
    """Collectives over a communicator of those ranks, one after the other, in a thread.

    Args:
        transport: Of that communicator, with no other user.
    """

    def __init__(self, transport: MpiTransport) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self._transport = transport
        self._waiting: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="farspan-mpi-sums", daemon=True)
        self._thread.start()

    def sum(self, flat: torch.Tensor) -> _Pending:
        return self._begin(lambda: self._reduce(flat, torch.add))

    def maximum(self, flat: torch.Tensor) -> _Pending:
        return self._begin(lambda: self._reduce(flat, torch.maximum))

    def broadcast(self, flat: torch.Tensor, source: int = 0) -> _Pending:
        return self._begin(lambda: self._broadcast(flat, source))

    def abort(self) -> None:
        self._transport.abort()

    def close(self) -> None:
        self._waiting.put(None)
        self._transport.close()
        self._thread.join()

    def _begin(self, run: Callable[[], None]) -> _Pending:
        pending = _Pending(run)
        self._waiting.put(pending)
        return pending

    def _run(self) -> None:
        while (pending := self._waiting.get()) is not None:
            error: BaseException | None = None
            try:
                with torch.no_grad():
                    pending.run()
            except BaseException as raised:
                error = raised
            pending.end(error)
            del pending, error  # they would keep tensors while nothing is to do

    def _reduce(self, flat: torch.Tensor, combine: Callable[..., Any]) -> None:
        if self.size == 1 or not flat.numel():
            return
        memory = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat.view(-1)
        bounds = block_bounds(memory.numel(), memory.element_size(), self.size)
        blocks = [memory[begin:end] for begin, end in bounds]
        received = torch.empty(max(map(len, blocks)), dtype=memory.dtype)
        for turn in range(self.size - 1):
            mine = blocks[(self.rank + 1 + turn) % self.size]
            ours = blocks[(self.rank + 2 + turn) % self.size]
            self._exchange(mine, received[: len(ours)])
            combine(ours, received[: len(ours)], out=ours)
        for turn in range(self.size - 1):
            self._exchange(blocks[(self.rank + turn) % self.size], blocks[(self.rank + 1 + turn) % self.size])

    def _exchange(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        """Sends down the ring, and receives from above."""
        above, below = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        receiving = self._transport.receive(incoming, above, _TAG) if len(incoming) else None
        sending = self._transport.send(outgoing, below, _TAG) if len(outgoing) else None
        for each in (receiving, sending):
            if each is not None:
                each.wait(_NO_LIMIT_S)  # `abort` ends it; who waits for the sum has a deadline

    def _broadcast(self, flat: torch.Tensor, source: int) -> None:
        memory = flat.view(-1)
        if not len(memory):
            return
        if self.rank == source:
            others = [other for other in range(self.size) if other != source]
            sends = [self._transport.send(memory, other, _TAG) for other in others]
            for each in sends:
                each.wait(_NO_LIMIT_S)
        else:
            self._transport.receive(memory, source, _TAG).wait(_NO_LIMIT_S)


def block_bounds(num_elements: int, element_bytes: int, num_ranks: int) -> list[tuple[int, int]]:
    """Returns where the block of each rank begins and ends, in elements.

    >>> block_bounds(10, 4, 2)
    [(0, 6), (6, 10)]
    """
    total_bytes = num_elements * element_bytes
    longest = element_bytes * max(1, _MOST_SEGMENT_BYTES // element_bytes)
    num_segments = _round_up(max(-(-total_bytes // longest), 2 * num_ranks), num_ranks)
    segment_bytes = _round_up(-(-total_bytes // num_segments), element_bytes)
    block = num_segments // num_ranks * segment_bytes // element_bytes
    return [(min(number * block, num_elements), min((number + 1) * block, num_elements)) for number in range(num_ranks)]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _nothing() -> None:
    pass
