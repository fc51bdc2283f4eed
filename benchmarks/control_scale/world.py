"""A world without torch: rank 0 in one process, all others as threads of another; `world.py ROLE WORDS` (JSON).

    root     a process of its own, whose processor time and bytes are counted       rank 0
    crowd    a process in which each rank is a thread that listens                  ranks 1, 2, ...

Both print a line of JSON when they are ready, and one when they have run their steps.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src")]

from farspan.runtime.side import SideChannel  # noqa: E402
from farspan.runtime.side.tree.numbers import host_of, parent  # noqa: E402

DEADLINE_S = 300.0
_SECRET = "benchmark"
_HEAD = struct.Struct("<?dI")
_NUM_PARAMETERS = 47
"""Of a rank: 61 layers of 256 experts with three matrices each, over 1,000 ranks."""
_NUM_LOSSES = 8
_BYTES_AT = (120, 128)
"""Where Linux' `struct tcp_info` has tcpi_bytes_acked and tcpi_bytes_received."""


def step(channels: list[SideChannel], number: int) -> None:
    """What every rank says in a step: that it begins it, and at its end what all are to know of it."""
    for channel in channels:
        channel.start(number, digest=number, data=(number, number, number))
    key = f"step {number}"
    for channel in channels:
        losses = bytes(4 * _NUM_LOSSES) if channel.rank == channel.world_size - 1 else b""
        busy_s = 0.001 * channel.rank
        channel.contribute(key, _HEAD.pack(False, busy_s, _NUM_PARAMETERS) + b"\1" * _NUM_PARAMETERS + losses)
    for channel in channels:
        channel.wait_agreed(number, DEADLINE_S)
        parts = channel.gathered(key, DEADLINE_S)
        if len(parts) != channel.world_size:
            raise RuntimeError(f"{len(parts)} parts over {channel.world_size} ranks")
        channel.forget(key)


def socket_bytes() -> int:
    """What all TCP connections of this process have sent and received so far."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
                    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += sum(struct.unpack_from("=Q", info, at)[0] for at in _BYTES_AT)
        except OSError:  # no socket
            continue
    return total


def root(words: dict[str, Any]) -> None:
    """Rank 0: its hub and its own channel."""
    num_ranks = words["num_ranks"]
    server = SideChannel.host(num_ranks, _SECRET, ("127.0.0.1", 0))
    channels = [SideChannel.connect(0, num_ranks, server.address, _SECRET, DEADLINE_S, server=server)]
    say(address=server.address)
    sys.stdin.readline()
    for number in range(words["num_first"]):
        step(channels, number)
    began, busy, moved = time.perf_counter(), time.process_time(), socket_bytes()
    for number in range(words["num_first"], words["num_first"] + words["num_steps"]):
        step(channels, number)
    busy_s, wall_s = time.process_time() - busy, time.perf_counter() - began
    moved = socket_bytes() - moved
    say(busy_s=busy_s / words["num_steps"], wall_s=wall_s / words["num_steps"], bytes=moved / words["num_steps"])
    channels[0].close(DEADLINE_S)


def crowd(words: dict[str, Any]) -> None:
    """All other ranks."""
    num_ranks = words["num_ranks"]
    addresses = {0: tuple(words["address"])}
    channels: list[SideChannel] = []
    for rank in range(1, num_ranks):
        host, server = host_of(rank, num_ranks), None
        if host == rank:
            above = addresses[parent(rank)]
            server = SideChannel.host(num_ranks, _SECRET, "127.0.0.1", rank=rank, parent=above, deadline_s=DEADLINE_S)
            addresses[rank] = server.address
        channels.append(SideChannel.connect(rank, num_ranks, addresses[host], _SECRET, DEADLINE_S, server=server))
    say(ready=True)
    sys.stdin.readline()
    for number in range(words["num_first"] + words["num_steps"]):
        step(channels, number)
    for channel in reversed(channels):
        channel.close(DEADLINE_S)
    say(over=True)


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    {"root": root, "crowd": crowd}[sys.argv[1]](json.loads(sys.argv[2]))
