"""Tensors over a communicator: bytes of any type, in the order of sending, and never a wait without an end."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.comm.mpi.fake_mpi import FakeMpi
from tests.comm.mpi.ranks import progresses, transports

from farspan.comm.mpi.transport import MpiTransport
from farspan.comm.transport import TransferError
from farspan.errors import PlanError

LONG_S, SHORT_S = 100.0, 0.05
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("most_bytes", [1 << 20, 48])
def test_what_arrives_has_the_bits_of_what_was_sent(dtype: torch.dtype, most_bytes: int) -> None:
    sent = torch.randint(0, 256, (401 * dtype.itemsize,), dtype=torch.uint8)
    sent = sent.bool() if dtype == torch.bool else sent.view(dtype)
    with transports(2, most_bytes) as (first, second):
        received = torch.empty_like(sent)
        receiving, sending = second.receive(received, 0, 4), first.send(sent, 1, 4)
        receiving.wait(LONG_S)
        sending.wait(LONG_S)
    assert received.view(torch.uint8).equal(sent.view(torch.uint8))


def test_each_channel_is_first_in_first_out() -> None:
    with transports(2) as (first, second):
        for number in range(20):
            first.send(torch.tensor([number]), 1, number % 2)
        received = [torch.empty(1, dtype=torch.int64) for _ in range(20)]
        for number in (*range(1, 20, 2), *range(0, 20, 2)):
            second.receive(received[number], 0, number % 2).wait(LONG_S)
    assert [each.item() for each in received] == list(range(20))


def test_nothing_is_a_message_too() -> None:
    with transports(2) as (first, second):
        receiving = second.receive(torch.empty(0), 0, 1)
        assert not receiving.is_done()
        first.send(torch.empty(0), 1, 1).wait(LONG_S)
        receiving.wait(LONG_S)


@pytest.mark.parametrize("num_sent", [3, 5, 400])
def test_another_size_than_was_agreed_is_an_error(num_sent: int) -> None:
    with transports(2) as (first, second):
        first.send(torch.ones(num_sent), 1, 0)
        with pytest.raises(TransferError, match="rank 0"):
            second.receive(torch.empty(4), 0, 0).wait(LONG_S)


def test_memory_is_held_until_the_other_rank_has_it_and_no_longer() -> None:
    with transports(2) as (first, second):
        sending = first.send(torch.ones(1000), 1, 0)
        with pytest.raises(TimeoutError, match=r"rank 1 has not ended in 0\.05 s"):
            sending.wait(SHORT_S)
        assert not sending.is_done()
        assert sending.memory is not None
        second.receive(torch.empty(1000), 0, 0).wait(LONG_S)
        sending.wait(LONG_S)
        assert sending.is_done()
        assert sending.memory is None


def test_an_abort_ends_a_wait_in_another_thread_and_all_that_comes_later() -> None:
    with transports(2) as (first, second):
        receiving = second.receive(torch.empty(4), 0, 0)
        sending = first.send(torch.ones(1000), 1, 7)
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                receiving.wait(LONG_S)
            except TransferError as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        second.abort()
        thread.join(LONG_S)
        assert [str(error) for error in errors] == ["connection aborted"]
        with pytest.raises(TransferError, match="aborted"):
            second.send(torch.ones(1), 0, 0)
        with pytest.raises(TransferError, match="aborted"):
            second.receive(torch.ones(1), 0, 0)
        assert not sending.is_done()
        first.abort()
        with pytest.raises(TransferError, match="aborted"):
            sending.wait(LONG_S)


def test_an_abort_leaves_the_transfers_of_other_owners_alone() -> None:
    mpi = FakeMpi()
    with progresses(mpi, 1) as (moving,):
        one, other = [MpiTransport(mpi.comms(2)[0], moving, 1 << 20) for _ in range(2)]
        receiving, others = [each.receive(torch.empty(4), 1, 0) for each in (one, other)]
        one.abort()
        with pytest.raises(TransferError, match="aborted"):
            receiving.wait(LONG_S)
        assert not others.is_done()
        other.abort()


def test_a_receive_that_was_aborted_takes_nothing() -> None:
    with transports(2) as (first, second):
        memory = torch.zeros(4)
        second.receive(memory, 0, 0)
        second.abort()
        first.send(torch.ones(4), 1, 0)
        assert not memory.any()


def test_a_tensor_of_a_gpu_is_an_error_with_a_name() -> None:
    with transports(2) as (first, _), pytest.raises(PlanError, match="meta was to go to another rank over MPI"):
        first.send(torch.empty(4, device="meta"), 1, 0)
