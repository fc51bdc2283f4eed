"""Side channels between ranks that are threads of this process, over real localhost sockets."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from farspan.control.channel import SideChannel

__all__ = ["LONG_S", "SHORT_S", "each", "open_ranks", "record", "step"]

LONG_S = 30.0
"""A deadline that only a bug reaches."""
SHORT_S = 0.05
"""A deadline that the test wants to reach."""


@contextlib.contextmanager
def open_ranks():
    """A function that connects all ranks of a world but the absent ones; all are closed at the end."""
    opened = []

    def make(world_size, absent=()):
        server = SideChannel.host(world_size, "secret", ("127.0.0.1", 0))
        channels = [
            SideChannel.connect(rank, world_size, server.address, "secret", LONG_S, server=None if rank else server)
            for rank in range(world_size)
            if rank not in absent
        ]
        opened.append((channels, bool(absent)))
        return channels

    yield make
    for channels, some_absent in opened:
        for channel in reversed(channels):
            channel.close(linger_s=0 if some_absent else LONG_S)


def each(channels, act):
    """Lets every rank act in a thread of its own; what each returned or raised."""

    def guarded(channel):
        try:
            return act(channel)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(channels)) as pool:
        return list(pool.map(guarded, channels, timeout=LONG_S))


def step(number, digest: Any = 1):
    def act(channel):
        channel.start(number, digest(channel.rank) if callable(digest) else digest)
        channel.wait_agreed(number, LONG_S)

    return act


def record(channels, programs):
    for channel, program in zip(channels, programs, strict=True):
        entries = [(sum(text.encode()), text) for text in program]
        channel.history = lambda step, entries=entries: entries
