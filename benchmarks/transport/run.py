"""farspan's transport between processes of one host against gloo: time one way, and bandwidth, from 4 KiB to 64 MiB.

Two processes of one thread each. One way is half a ping-pong; a stream is many messages one after the other, ended by a
reply. The transports take turns within one run, in an order that rotates. With "touch", the receiver also sums what it
got.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.common import arguments, finish, run_ranks  # noqa: E402

from farspan.comm.same_host.copies import SameHostTransport  # noqa: E402

LATENCY_BAR, LATENCY_BYTES = 0.5, 4 << 10
BANDWIDTH_BAR, BANDWIDTH_BYTES = 2.5, 16 << 20
# bytes -> ping-pongs of a turn, messages of its stream
COUNTS = {4 << 10: (100, 200), 64 << 10: (100, 100), 1 << 20: (30, 40), 16 << 20: (4, 8), 64 << 20: (2, 4)}
MEASURES = ("one_way", "stream", "one_way_touch", "stream_touch")
WINDOW = 2
LONG_S = 60.0

Wait = Callable[[], object]


class Farspan:
    """The same-host transport; receives are posted ahead."""

    name = "farspan"
    window = WINDOW

    def __init__(self, rank: int) -> None:
        transport = SameHostTransport.join(rank, gather, LONG_S)
        if transport is None:
            raise RuntimeError("these two processes cannot read each other's memory")
        self.transport, self.peer = transport, 1 - rank

    def send(self, flat: Tensor) -> Wait:
        work = self.transport.send(flat, self.peer, 0)
        return lambda: work.wait(LONG_S)

    def receive(self, flat: Tensor) -> Wait:
        work = self.transport.receive(flat, self.peer, 0)
        return lambda: work.wait(LONG_S)


class GlooPosted:
    """gloo with isend, and irecv posted ahead."""

    name = "gloo irecv"
    window = WINDOW

    def __init__(self, rank: int) -> None:
        self.peer = 1 - rank

    def send(self, flat: Tensor) -> Wait:
        work = dist.isend(flat, self.peer)
        assert work is not None
        return work.wait

    def receive(self, flat: Tensor) -> Wait:
        work = dist.irecv(flat, self.peer)
        assert work is not None
        return work.wait


class GlooBlocking:
    """gloo with send and recv, into one buffer again and again."""

    name = "gloo recv"
    window = 1

    def __init__(self, rank: int) -> None:
        self.peer = 1 - rank

    def send(self, flat: Tensor) -> Wait:
        dist.send(flat, self.peer)
        return _nothing

    def receive(self, flat: Tensor) -> Wait:
        return lambda: dist.recv(flat, self.peer)


Transport = Farspan | GlooPosted | GlooBlocking


def _nothing() -> None:
    pass


def gather(blob: bytes) -> list[bytes]:
    """What `SameHostTransport.join` needs of the ranks."""
    blobs: list[Any] = [None, None]
    dist.all_gather_object(blobs, blob)
    return blobs


def ping_pong(transport: Transport, rank: int, buffers: list[Tensor], count: int, touch: bool) -> list[float]:
    """Seconds one way, of each round trip. The receive is posted before the message that it answers is sent."""
    outgoing, incoming = buffers[-1], buffers[0]
    times: list[float] = []
    arrival = transport.receive(incoming) if rank else _nothing
    for i in range(count):
        began = time.perf_counter()
        if rank:
            arrival()
            if touch:
                incoming.sum()
            arrival = transport.receive(incoming) if i + 1 < count else _nothing
            departure = transport.send(outgoing)
        else:
            arrival = transport.receive(incoming)
            departure = transport.send(outgoing)
            arrival()
            if touch:
                incoming.sum()
        departure()
        times.append((time.perf_counter() - began) / 2)
    return times


def stream(transport: Transport, rank: int, buffers: list[Tensor], count: int, touch: bool) -> float:
    """Seconds per message on rank 0, until rank 1 has all."""
    reply = torch.zeros(1)
    began = time.perf_counter()
    if rank == 0:
        sending: deque[Wait] = deque()
        for _ in range(count):
            if len(sending) == transport.window:
                sending.popleft()()
            sending.append(transport.send(buffers[-1]))
        for wait in sending:
            wait()
        transport.receive(reply)()
    else:
        receiving = deque(transport.receive(buffers[i]) for i in range(transport.window))
        for i in range(count):
            receiving.popleft()()
            buffer = buffers[i % transport.window]
            if touch:
                buffer.sum()
            if i + transport.window < count:
                receiving.append(transport.receive(buffer))
        transport.send(reply)()
    return (time.perf_counter() - began) / count


def copy_s(buffers: list[Tensor], count: int) -> float:
    """Seconds to copy a buffer within one process."""
    times: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        buffers[0].copy_(buffers[-1])
        times.append(time.perf_counter() - began)
    return median(times)


def worker(args: Any) -> None:
    """One rank; rank 0 writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    transports: list[Transport] = [Farspan(rank), GlooPosted(rank), GlooBlocking(rank)]
    rows: list[dict[str, Any]] = []
    for size, (num_round_trips, num_messages) in COUNTS.items():
        buffers = [torch.full((size // 4,), float(rank)) for _ in range(WINDOW + 1)]
        samples: dict[tuple[str, str], list[float]] = defaultdict(list)
        for transport in transports:  # warm up, and look at what came
            ping_pong(transport, rank, buffers, 2, True)
            if not bool((buffers[0] == 1 - rank).all()):
                raise AssertionError(f"{transport.name} did not bring {size} bytes")
        for turn in range(args.turns):
            for touch in (False, True):
                mark = "_touch" if touch else ""
                for place in range(len(transports)):
                    transport = transports[(place + turn) % len(transports)]
                    dist.barrier()
                    times = ping_pong(transport, rank, buffers, num_round_trips, touch)
                    samples[transport.name, f"one_way{mark}"] += times
                    dist.barrier()
                    samples[transport.name, f"stream{mark}"].append(
                        stream(transport, rank, buffers, num_messages, touch)
                    )
            dist.barrier()
            if rank == 0:
                samples["copy", "stream"].append(copy_s(buffers, num_messages))
        rows += [
            {"size_bytes": size, "transport": name, "measure": measure, "median_s": median(times), "min_s": min(times)}
            for (name, measure), times in samples.items()
        ]
    dist.barrier()
    if rank == 0:
        Path(args.worker).write_text(json.dumps(rows))


class Table:
    """Medians by size, transport and measure; gloo is the faster of its two ways, each time."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.medians = {(row["size_bytes"], row["transport"], row["measure"]): row["median_s"] for row in rows}

    def ratio(self, size: int, measure: str) -> float:
        """gloo's time / farspan's."""
        gloo = min(self.medians[size, transport.name, measure] for transport in (GlooPosted, GlooBlocking))
        return gloo / self.medians[size, Farspan.name, measure]

    def show(self) -> None:
        print("     size  transport           one way       stream   touch: one way       stream          bandwidth")
        for size in COUNTS:
            for name in (Farspan.name, GlooPosted.name, GlooBlocking.name):
                times = [self.medians[size, name, measure] for measure in MEASURES]
                cells = "".join(f"{value * 1e6:13,.1f}" for value in times)
                print(f"{size >> 10:5d} KiB  {name:10s}{cells} us   {size / times[1] / 1e9:6.2f} GB/s")
            print(" " * 11 + "gloo / ours" + "".join(f"{self.ratio(size, measure):10.2f} x " for measure in MEASURES))
            copy = self.medians[size, "copy", "stream"]
            print(" " * 11 + f"one copy {copy * 1e6:15,.1f} us" + " " * 39 + f"{size / copy / 1e9:6.2f} GB/s")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--turns", type=int, help="turns of each transport and size; 20, or 3 with --quick")
    args = parser.parse_args()
    args.turns = args.turns or (3 if args.quick else 20)
    if args.worker:
        worker(args)
        return
    rows = run_ranks(__file__, 2, ["--turns", str(args.turns)], timeout_s=120 if args.quick else 900)
    table = Table(rows)
    table.show()
    latency = 1 / table.ratio(LATENCY_BYTES, "one_way")
    bandwidth = table.ratio(BANDWIDTH_BYTES, "stream")
    figure = (
        f"4 KiB one way {latency:.2f} x gloo's time (bar {LATENCY_BAR}), "
        f"16 MiB {bandwidth:.2f} x gloo's bandwidth (bar {BANDWIDTH_BAR}; "
        f"{table.ratio(BANDWIDTH_BYTES, 'stream_touch'):.2f} x where the receiver reads it)"
    )
    finish(args, rows=rows, figure=figure, holds=latency <= LATENCY_BAR and bandwidth >= BANDWIDTH_BAR)


if __name__ == "__main__":
    main()
