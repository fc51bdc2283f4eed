"""A world without torch: rank 0 in one process, all others in another; `world.py ROLE WORDS` (JSON).

    root     a process of its own, whose processor time and bytes are counted       rank 0
    crowd    each rank is a thread that listens, each connection a socket           ranks 1, 2, ...
    light    the same in one thread: sockets to rank 0 only, what lies below        ranks 1, 2, ...
             them are relays without sockets

Both print a line of JSON when they are ready, and one when they have run their steps.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src")]

from farspan.control.channel import SideChannel  # noqa: E402
from farspan.control.hub.joining import Client, join  # noqa: E402
from farspan.control.tree.blocks import parts_by_rank  # noqa: E402
from farspan.control.tree.numbers import children, host_of, parent  # noqa: E402
from farspan.control.tree.relay import Relay  # noqa: E402
from farspan.control.wire import Frame, encode, send_all  # noqa: E402

DEADLINE_S = 300.0
_SECRET = "benchmark"
_HEAD = struct.Struct("<?dfffII")
_NUM_PARAMETERS = 47
"""Of a rank: 61 layers of 256 experts with three matrices each, over 1,000 ranks."""
_NUM_LOSSES = 8
_EXPERTS = [
    (at, expert, part) for at in range(61) for expert in range(256) for part in ("gate_proj", "up_proj", "down_proj")
]
_BYTES_AT = (120, 128)
"""Where Linux' `struct tcp_info` has tcpi_bytes_acked and tcpi_bytes_received."""


def begin(number: int) -> dict[str, Any]:
    """What a rank says when it begins a step."""
    return {"step": number, "digest": number, "data": (number, number, number)}


def part(rank: int, world_size: int) -> bytes:
    """What a rank says at the end of a step: its busy seconds and pace, which of its parameters have a gradient, its
    losses."""
    losses = bytes(4 * _NUM_LOSSES) if rank == world_size - 1 else b""
    return _HEAD.pack(False, 0.001 * rank, 0.001, 0.001, 0.002, _NUM_PARAMETERS, 1) + b"\1" + losses


def step(channels: list[SideChannel], number: int) -> None:
    """A step of real channels."""
    for channel in channels:
        channel.start(**begin(number))
    key = f"step {number}"
    for channel in channels:
        channel.contribute(key, part(channel.rank, channel.world_size))
    for channel in channels:
        channel.wait_agreed(number, DEADLINE_S)
        parts = channel.gathered(key, DEADLINE_S)
        if len(parts) != channel.world_size:
            raise RuntimeError(f"{len(parts)} parts over {channel.world_size} ranks")
        channel.forget(key)


class Light:
    """All ranks below one connection of rank 0."""

    def __init__(self, rank: int, world_size: int, address: tuple[str, int]) -> None:
        self._rank, self._world_size = rank, world_size
        self._sock, self._reader = join(Client(rank, world_size, _SECRET, 0), address, DEADLINE_S)
        self._sock.settimeout(DEADLINE_S)
        self._relay = Relay(rank, world_size) if children(rank, world_size) else None
        self._heard: list[Frame] = self._reader.take()

    def say(self, header: dict[str, Any], payload_of: Callable[[int], bytes]) -> None:
        """Every rank says this, with its own payload."""
        if self._relay is None:
            send_all(self._sock, encode(header, payload_of(self._rank)))
            return
        for rank in self._relay.ranks:
            for message in self._relay.on_message(rank, header, payload_of(rank)):
                send_all(self._sock, encode(message.header, message.payload))

    def hear(self, kind: str) -> Frame:
        """The next frame of this kind."""
        while True:
            for at, frame in enumerate(self._heard):
                if frame.header["t"] == kind:
                    del self._heard[: at + 1]
                    return frame
            self._heard = self._reader.read(self._sock)

    def close(self) -> None:
        """Every rank says goodbye."""
        self.say({"t": "bye"}, lambda rank: b"")
        self._sock.close()


def light_step(lights: list[Light], num_ranks: int, number: int) -> None:
    """A step of light ranks."""
    for light in lights:
        light.say({"t": "start", **begin(number)}, lambda rank: b"")
    for light in lights:
        light.say({"t": "contribute", "key": f"step {number}"}, lambda rank: part(rank, num_ranks))
    for light in lights:
        light.hear("agreed")
        parts = light.hear("gathered").payload
    if parts_by_rank(parts, num_ranks)[-1] != part(num_ranks - 1, num_ranks):
        raise RuntimeError("the parts are not what the ranks have given")


def agree_on_names(channels: list[SideChannel]) -> dict[str, float]:
    """All ranks agree on the names of a large model; then the last rank has another one. Seconds on the wall."""
    from farspan.errors import DivergenceError
    from farspan.execute.agreement.agreement import Agreement

    names = [
        f"layers.{at}.mlp.experts.{expert}.{part}_proj.weight: float32[7168, 2048]" for at, expert, part in _EXPERTS
    ]
    text, other = "\n".join(names), "\n".join([*names[:-1], f"{names[-1]} that is trained"])
    agreements = [Agreement(channel, DEADLINE_S) for channel in channels]

    def differ(agreement: Agreement) -> str:
        is_last = agreement.side.rank == agreement.side.world_size - 1
        try:
            agreement.agree_on("model", other if is_last else text)
        except DivergenceError as error:
            return error.why
        return ""

    with ThreadPoolExecutor(len(channels)) as pool:
        began = time.perf_counter()
        list(pool.map(lambda agreement: agreement.agree_on("model", text), agreements))
        agreed = time.perf_counter()
        said = set(pool.map(differ, agreements))
        ended = time.perf_counter()
    last = channels[0].world_size - 1
    if said != {f"rank 0: {names[-1]}\nrank {last}: {names[-1]} that is trained"}:
        raise RuntimeError(f"the difference is not found: {said}")
    return {"text_bytes": len(text), "equal_s": agreed - began, "different_s": ended - agreed}


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
    row = {"busy_s": busy_s, "wall_s": wall_s, "bytes": moved}
    row = {name: number / words["num_steps"] for name, number in row.items()}
    say(**row, **(agree_on_names(channels) if words["names"] else {}))
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
    if words["names"]:
        agree_on_names(channels)
    say(over=True)
    sys.stdin.readline()  # what its connections have carried is still to be counted
    for channel in reversed(channels):
        channel.close(DEADLINE_S)


def light(words: dict[str, Any]) -> None:
    """All other ranks, in one thread."""
    num_ranks, address = words["num_ranks"], tuple(words["address"])
    lights = [Light(rank, num_ranks, address) for rank in children(0, num_ranks)]
    say(ready=True)
    sys.stdin.readline()
    for number in range(words["num_first"] + words["num_steps"]):
        light_step(lights, num_ranks, number)
    say(over=True)
    sys.stdin.readline()
    for each in lights:
        each.close()


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    {"root": root, "crowd": crowd, "light": light}[sys.argv[1]](json.loads(sys.argv[2]))
