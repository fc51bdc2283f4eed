"""Ranks that are threads, and reach each other by a communicator in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.comm.mpi.fake_mpi import FakeMpi

from farspan.comm.mpi.progress import Progress
from farspan.comm.mpi.transport import MpiTransport

__all__ = ["in_threads", "progresses", "transports"]


def in_threads(num_ranks: int, program: Callable[[int], Any], limit_s: float = 60.0) -> list[Any]:
    """Run `program(rank)` in a thread for each rank; return what they returned, or raise what one raised."""
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = program(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return results


@contextmanager
def progresses(mpi: FakeMpi, num_ranks: int) -> Iterator[list[Progress]]:
    """What moves the messages of each rank."""
    made = [Progress(mpi, comm) for comm in mpi.comms(num_ranks)]
    try:
        yield made
    finally:
        for progress in made:
            progress.close()


@contextmanager
def transports(num_ranks: int, most_bytes: int = 1 << 20) -> Iterator[list[MpiTransport]]:
    """The transport of each rank."""
    mpi = FakeMpi()
    with progresses(mpi, num_ranks) as moving:
        made = [MpiTransport(comm, moving[rank], most_bytes) for rank, comm in enumerate(mpi.comms(num_ranks))]
        yield made
        for transport in made:
            transport.close()
