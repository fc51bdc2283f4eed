"""Sums over a communicator have the bits that gloo's have, whatever the number of ranks and elements."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.comm.mpi.ranks import in_threads, transports

from farspan.comm.collectives import Collectives, GlooCollectives
from farspan.comm.mpi.sums import MpiCollectives
from farspan.comm.transport import TransferError

LONG_S = 100.0
SIZES = (1, 2, 7, 1001, 65_537, 700_001)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


def of_rank(rank: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(number, generator=generator, dtype=torch.complex64 if dtype.is_complex else None).to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def sums_of(peers: Collectives) -> list[bytes]:
    found = [of_rank(peers.rank, number, dtype) for number in SIZES for dtype in DTYPES]
    for pending in [peers.sum(each) for each in found]:
        pending.wait(LONG_S)
    return list(map(bits, found))


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_sums_have_the_bits_of_gloos(num_ranks: int) -> None:
    store = dist.HashStore()

    def over_gloo(rank: int) -> list[bytes]:
        peers = GlooCollectives(store, rank, num_ranks, "127.0.0.1", LONG_S)
        found = sums_of(peers)
        store.set(f"done {rank}", "")
        store.wait([f"done {each}" for each in range(num_ranks)], timedelta(seconds=LONG_S))
        peers.close()
        return found

    expected = in_threads(num_ranks, over_gloo)
    with transports(num_ranks) as made:
        peers = [MpiCollectives(each) for each in made]
        found = in_threads(num_ranks, lambda rank: sums_of(peers[rank]))
        for each in peers:
            each.close()
    assert found == expected


def test_the_largest_and_what_the_first_has() -> None:
    with transports(3) as made:
        peers = [MpiCollectives(each) for each in made]

        def run(rank: int) -> tuple[list[int], list[float]]:
            mask = torch.tensor([rank == 1, rank == 2, False], dtype=torch.uint8)
            given = torch.full((40,), float(rank + 5))
            for pending in (peers[rank].maximum(mask), peers[rank].broadcast(given)):
                pending.wait(LONG_S)
            return mask.tolist(), sorted(set(given.tolist()))

        assert in_threads(3, run) == [([1, 1, 0], [5.0])] * 3
        for each in peers:
            each.close()


def test_a_sum_for_which_a_rank_does_not_come_ends_in_time_and_with_an_abort() -> None:
    with transports(2) as made:
        peers = MpiCollectives(made[0])
        pending = peers.sum(torch.ones(1000))
        with pytest.raises(TimeoutError):
            pending.wait(0.05)
        assert not pending.is_done()
        peers.abort()
        with pytest.raises(TransferError, match="aborted"):
            pending.wait(LONG_S)
        peers.close()
