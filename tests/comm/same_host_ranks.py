"""What the cases of the same-host transport share: three real processes, each of which goes through all cases of a file
in order, each with a transport of its own, and prints a line for each. The tests look at the lines.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Finished

from farspan.comm.same_host import peers
from farspan.comm.same_host.copies import SameHostTransport

NUM_RANKS = 3
LONG_S = 100.0


class Ranks:
    """What a rank's cases use: its number, and a store that all ranks share."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        port = int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore("127.0.0.1", port, NUM_RANKS, self.rank == 0, timedelta(seconds=LONG_S))
        self.num_exchanges = 0

    def exchange(self, blob: bytes) -> list[bytes]:
        self.num_exchanges += 1
        self.store.set(f"{self.num_exchanges}/{self.rank}", blob.decode())
        return [self.store.get(f"{self.num_exchanges}/{rank}") for rank in range(NUM_RANKS)]

    def barrier(self) -> None:
        self.exchange(b"-")

    def join(self) -> SameHostTransport:
        transport = SameHostTransport.join(self.rank, self.exchange, LONG_S)
        assert transport is not None
        assert [transport.reaches(rank) for rank in range(NUM_RANKS)] == [
            rank != self.rank for rank in range(NUM_RANKS)
        ]
        return transport


def content(size: int, seed: int) -> torch.Tensor:
    return (torch.arange(size) * 7 + seed * 31).to(torch.uint8)


def empty(size: int) -> torch.Tensor:
    return torch.full((size,), 99, dtype=torch.uint8)


def wait_for_end(ranks: Ranks) -> None:
    """What the two ranks do last that are left: the store lives in rank 0."""
    if ranks.rank == 1:
        ranks.store.set("end", "")
    else:
        ranks.store.wait(["end"], timedelta(seconds=LONG_S))


def raises(kind: type[Exception], text: str, call: Callable[..., object], *arguments: object) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call(*arguments)


def wait_first(memory: peers.OtherMemory, name: str, wait: Callable[[], object]) -> None:
    """Before each copy, `wait()`."""
    copy = getattr(memory, name)

    def waits_and_copies(here: int, there: int, size: int) -> None:
        wait()
        copy(here, there, size)

    setattr(memory, name, waits_and_copies)


def run(cases: Sequence[Callable[[Ranks], None]]) -> None:
    """A rank; the last case kills rank 2."""
    torch.set_num_threads(1)
    ranks = Ranks()
    for case in cases:
        began = time.monotonic()
        case(ranks)
        if case is not cases[-1]:
            ranks.barrier()
        print(case.__name__, f"{time.monotonic() - began:.2f} s", flush=True)


def check(finished: Sequence[Finished], case: str, *, is_last: bool) -> None:
    for rank, process in enumerate(finished):
        if is_last and rank == 2:
            assert process.code == -signal.SIGKILL
        else:
            assert case in process.stdout.split(), f"rank {rank} failed in {case} or before:\n{process.stderr}"


def check_end(finished: Sequence[Finished]) -> None:
    codes = [process.code for process in finished]
    assert codes == [0, 0, -signal.SIGKILL], "\n".join(process.stderr for process in finished)
    assert all("Traceback" not in process.stderr for process in finished)
