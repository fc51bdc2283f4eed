"""Side channels between ranks that are threads of this process, over real localhost sockets."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from farspan.control.channel import SideChannel
from farspan.control.hub.server import HubServer
from farspan.control.tree.numbers import host_of, parent

__all__ = ["LONG_S", "SHORT_S", "connect", "count_hub_bytes", "each", "open_hubs", "open_ranks", "record", "step"]

LONG_S = 100.0
"""A deadline that only a bug reaches, also on a machine under load."""
SHORT_S = 0.05
"""A deadline that the test wants to reach."""


def open_hubs(world_size: int, secret: str, host: str = "127.0.0.1") -> dict[int, HubServer]:
    """The hub, and the relays of ranks that have children, by rank."""
    servers = {0: SideChannel.host(world_size, secret, host)}
    for rank in range(1, world_size):
        if host_of(rank, world_size) == rank:
            above = servers[parent(rank)].address
            servers[rank] = SideChannel.host(world_size, secret, host, rank=rank, parent=above, deadline_s=LONG_S)
    return servers


def connect(servers: dict[int, HubServer], rank: int, world_size: int, secret: str, deadline_s: float) -> SideChannel:
    """The channel of a rank."""
    address = servers[host_of(rank, world_size)].address
    return SideChannel.connect(rank, world_size, address, secret, deadline_s, server=servers.get(rank))


@contextlib.contextmanager
def open_ranks():
    """A function that connects all ranks of a world but the absent ones; all are closed at the end."""
    opened = []

    def make(world_size, absent=()):
        servers = open_hubs(world_size, "secret")
        ranks = [rank for rank in range(world_size) if rank not in absent]
        channels = [connect(servers, rank, world_size, "secret", LONG_S) for rank in ranks]
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


def count_hub_bytes(monkeypatch) -> list[int]:
    """The payloads that come to hubs and relays from here on, summed up in a list of one."""
    counted, hear = [0], HubServer._hear

    def heard(self, conn, rank, frame):
        counted[0] += len(frame.payload)
        hear(self, conn, rank, frame)

    monkeypatch.setattr(HubServer, "_hear", heard)
    return counted
