"""Ranks that are threads of one process, for tests: queues in memory, with the same rules as a network."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict

import torch

__all__ = ["LocalMedium", "LocalNetwork"]


class LocalNetwork:
    """What the local media of all ranks share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.channels: dict[tuple[int, int, int], queue.SimpleQueue[torch.Tensor | None]] = defaultdict(queue.SimpleQueue)

    def channel(self, src: int, dst: int, number: int) -> queue.SimpleQueue[torch.Tensor | None]:
        with self.lock:
            return self.channels[src, dst, number]


class _Sent:
    def is_done(self) -> bool:
        return True

    def wait(self, deadline_s: float) -> None:
        pass


class _Receiving:
    def __init__(self, medium: LocalMedium, messages: queue.SimpleQueue[torch.Tensor | None], flat: torch.Tensor) -> None:
        self.medium = medium
        self.messages = messages
        self.flat = flat
        self.is_here = False

    def is_done(self) -> bool:
        return self.is_here

    def wait(self, deadline_s: float) -> None:
        if self.is_here:
            return
        try:
            message = self.messages.get(timeout=deadline_s)
        except queue.Empty:
            raise TimeoutError(f"nothing came in {deadline_s:g} s") from None
        if message is None:
            self.messages.put(None)
            raise RuntimeError("the network was aborted")
        self.flat.copy_(message)
        self.is_here = True


class LocalMedium:
    """One rank's access to a `LocalNetwork`."""

    def __init__(self, rank: int, network: LocalNetwork) -> None:
        self.rank = rank
        self.network = network

    def send(self, flat: torch.Tensor, dst: int, channel: int) -> _Sent:
        self.network.channel(self.rank, dst, channel).put(flat.clone())
        return _Sent()

    def receive(self, flat: torch.Tensor, src: int, channel: int) -> _Receiving:
        return _Receiving(self, self.network.channel(src, self.rank, channel), flat)

    def abort(self) -> None:
        with self.network.lock:
            mine = [messages for (_, dst, _), messages in self.network.channels.items() if dst == self.rank]
        for messages in mine:
            messages.put(None)
