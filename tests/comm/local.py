"""The transport between ranks that are threads of one process: queues in memory, with the same rules as a network."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict, deque

import torch

from farspan.comm.transport import TransferError

__all__ = ["LocalTransport", "LocalNetwork"]


class _Channel:
    """Messages in order of sending, receives in order of posting: the first meets the first."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        self.posted: deque[_Receiving] = deque()


class LocalNetwork:
    """What the transports of all ranks share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.channels: dict[tuple[int, int, int], _Channel] = defaultdict(_Channel)

    def channel(self, src: int, dst: int, number: int) -> _Channel:
        with self.lock:
            return self.channels[src, dst, number]


class _Sent:
    def is_done(self) -> bool:
        return True

    def wait(self, deadline_s: float) -> None:
        pass


class _Receiving:
    def __init__(self, channel: _Channel, flat: torch.Tensor) -> None:
        self.channel = channel
        self.flat = flat
        self.is_here = False
        channel.posted.append(self)

    def is_done(self) -> bool:
        while not self.is_here:
            try:
                self._take(self.channel.messages.get_nowait())
            except queue.Empty:
                return False
        return True

    def wait(self, deadline_s: float) -> None:
        while not self.is_here:
            try:
                self._take(self.channel.messages.get(timeout=deadline_s))
            except queue.Empty:
                raise TimeoutError(f"nothing came in {deadline_s:g} s") from None

    def _take(self, message: torch.Tensor | None) -> None:
        """A message is for the receive that was posted first."""
        if message is None:
            self.channel.messages.put(None)
            raise TransferError("connection aborted")
        first = self.channel.posted.popleft()
        if message.nbytes != first.flat.nbytes:
            raise TransferError(f"{message.nbytes} bytes came where {first.flat.nbytes} were to be received")
        first.flat.copy_(message)
        first.is_here = True


class LocalTransport:
    """One rank's access to a `LocalNetwork`."""

    def __init__(self, rank: int, network: LocalNetwork) -> None:
        self.rank = rank
        self.network = network
        self._is_aborted = False

    def send(self, flat: torch.Tensor, dst: int, channel: int) -> _Sent:
        self.network.channel(self.rank, dst, channel).messages.put(flat.clone())
        return _Sent()

    def receive(self, flat: torch.Tensor, src: int, channel: int) -> _Receiving:
        receiving = _Receiving(self.network.channel(src, self.rank, channel), flat)
        if self._is_aborted:  # the channel may be younger than that
            receiving.channel.messages.put(None)
        return receiving

    def checks_sizes(self, src: int) -> bool:
        return True

    def abort(self) -> None:
        self._is_aborted = True
        with self.network.lock:
            mine = [channel for (_, dst, _), channel in self.network.channels.items() if dst == self.rank]
        for channel in mine:
            channel.messages.put(None)
