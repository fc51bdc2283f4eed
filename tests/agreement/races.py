"""Ranks that are threads, with delays where a race would hide: what comes out must not depend on who is faster.

A transfer reads its memory until it has ended, and a real one may end late. `LateTransport` is a `LocalTransport` that
copies nothing when a message is sent: the receiver copies it out of the sender's memory, and only `DELAY_S` after it
began to wait, so that the sender has gone on by then. `reading_late` delays what a rank asks of others in the same way.
A delay only gives a race its chance: a test with one never fails because the machine is slow.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tests.comm.local import LocalNetwork

from farspan.comm.transport import TransferError
from farspan.execute.process.world import current_engine

__all__ = ["DELAY_S", "LateTransport", "reading_late"]

DELAY_S = 0.2


class _Sent:
    """A message that still lies in the sender's memory."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.has_ended = threading.Event()

    def is_done(self) -> bool:
        return self.has_ended.is_set()

    def wait(self, deadline_s: float) -> None:
        if not self.has_ended.wait(deadline_s):
            raise TimeoutError(f"nobody took a message in {deadline_s:g} s")


class _Receiving:
    def __init__(self, messages: queue.SimpleQueue[Any], posted: deque[Any], flat: torch.Tensor) -> None:
        self.messages, self.posted, self.flat = messages, posted, flat
        self.is_here = False
        posted.append(self)

    def is_done(self) -> bool:
        return self.is_here

    def wait(self, deadline_s: float) -> None:
        while not self.is_here:
            try:
                message = self.messages.get(timeout=deadline_s)
            except queue.Empty:
                raise TimeoutError(f"nothing came in {deadline_s:g} s") from None
            if message is None:
                self.messages.put(None)
                raise TransferError("connection aborted")
            time.sleep(DELAY_S)
            first = self.posted.popleft()
            first.flat.copy_(message.flat)
            first.is_here = True
            message.has_ended.set()


class LateTransport:
    """One rank's access to a network on which everything takes its time."""

    def __init__(self, rank: int, network: LocalNetwork) -> None:
        self.rank, self.network = rank, network
        self.is_aborted = False

    def send(self, flat: torch.Tensor, dst: int, channel: int) -> _Sent:
        sent = _Sent(flat)
        self.network.channel(self.rank, dst, channel).messages.put(sent)  # type: ignore[arg-type]
        return sent

    def receive(self, flat: torch.Tensor, src: int, channel: int) -> _Receiving:
        found = self.network.channel(src, self.rank, channel)
        receiving = _Receiving(found.messages, found.posted, flat)  # type: ignore[arg-type]
        if self.is_aborted:
            found.messages.put(None)
        return receiving

    def checks_sizes(self, src: int) -> bool:
        return True

    def abort(self) -> None:
        self.is_aborted = True
        with self.network.lock:
            mine = [channel for (_, dst, _), channel in self.network.channels.items() if dst == self.rank]
        for channel in mine:
            channel.messages.put(None)


@contextmanager
def reading_late() -> Iterator[None]:
    """What this rank asks others for in the body, it asks late."""
    engine = current_engine()
    assert engine is not None
    request = engine.side.request

    def late(*args: object) -> object:
        time.sleep(DELAY_S)
        return request(*args)  # type: ignore[arg-type]

    engine.side.request = late  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        engine.side.request = request  # type: ignore[method-assign]
