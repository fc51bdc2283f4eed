"""Pulls: a rank asks another one for tensors, which come to it and pass nobody else."""

from __future__ import annotations

import socket
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.comm.pulls.answering import of_rank, wait_until
from tests.support.side import LONG_S, SHORT_S, count_hub_bytes, each, step

from farspan.comm.pulls.answers import read_answer, send_request
from farspan.comm.pulls.listener import service_of
from farspan.control.hub.joining import Client, join
from farspan.control.wire import encode, send_all
from farspan.errors import DeadlineError, FarspanError, RemoteError

MIB = 1 << 20


def test_all_ranks_ask_each_other_again_and_again(ranks):
    channels, pulls = ranks(3, of_rank)

    def act(channel):
        for turn in range(5):
            for rank in range(3):
                body, (first, second) = pulls[channel.rank].pull(rank, {"turn": turn})
                assert body == {"from": rank, "turn": turn}
                assert first.tolist() == [rank] * 3 and second.item() == 0.5

    assert each(channels, act) == [None] * 3


def test_what_is_asked_for_in_a_thread_comes_while_the_program_goes_on(ranks):
    may_answer = threading.Event()

    def answer(rank, request):
        assert may_answer.wait(LONG_S)
        return of_rank(rank, request)

    channels, pulls = ranks(2, answer)
    coming = [pulls[0].begin(1, {"turn": turn}) for turn in range(3)]
    assert channels[0].waits.current is None  # nobody waits yet
    may_answer.set()
    assert [each.wait()[0]["turn"] for each in coming] == [0, 1, 2]


def test_who_waits_for_what_was_asked_in_a_thread_is_told_why_it_does_not_come(ranks):
    def answer(rank, request):
        raise KeyError("nothing of that name")

    _, pulls = ranks(2, answer)
    with pytest.raises(RemoteError, match="nothing of that name"):
        pulls[0].begin(1, {}).wait()
    pulls[0].close()
    with pytest.raises(FarspanError, match="aborted"):
        pulls[0].begin(1, {}).wait()


def test_a_large_answer_does_not_pass_the_hub_and_steps_go_on(ranks, monkeypatch):
    hub_bytes = count_hub_bytes(monkeypatch)
    data = torch.arange(64 * MIB, dtype=torch.uint8)
    channels, pulls = ranks(3, lambda rank, request: ({}, [data, torch.ones(5)]))
    with ThreadPoolExecutor(1) as pool:
        pulled = pool.submit(pulls[2].pull, 1, {})
        for number in range(20):
            assert each(channels, step(number)) == [None] * 3
        _, (large, small) = pulled.result(LONG_S)
    assert torch.equal(large, data) and small.tolist() == [1] * 5
    assert hub_bytes == [0]


def test_what_comes_has_memory_of_its_own_and_what_goes_is_as_it_was(ranks):
    data = torch.zeros(4)
    _, pulls = ranks(2, lambda rank, request: ({}, [data, data]))
    for reader in pulls:  # the owner itself, and another
        _, (one, other) = reader.pull(1, {})
        one.add_(1)
        assert other.tolist() == [0] * 4 and data.tolist() == [0] * 4


def test_a_connection_that_waits_for_the_next_question_keeps_no_memory_of_the_last_one(ranks):
    _, pulls = ranks(2, lambda rank, request: ({}, [torch.ones(4)]))
    memory = torch.empty(16, dtype=torch.uint8)
    kept = weakref.ref(memory)
    pulls[0].pull(1, {}, memory)
    assert memory.view(torch.float32).tolist() == [1] * 4
    del memory
    assert kept() is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0, 3),
        torch.tensor(7),
        torch.arange(12).reshape(3, 4).T,
        torch.ones(3, dtype=torch.bfloat16).expand(2, 3),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(2, requires_grad=True),
    ],
)
def test_tensors_of_every_layout_arrive(ranks, tensor):
    _, pulls = ranks(2, lambda rank, request: ({}, [tensor]))
    _, (found,) = pulls[0].pull(1, {})
    assert found.dtype == tensor.dtype and found.shape == tensor.shape and not found.requires_grad
    assert torch.equal(found, tensor.detach())


def test_nothing_listens_before_somebody_asks(ranks):
    _, pulls = ranks(2, of_rank)
    assert [mine._listener for mine in pulls] == [None, None]
    pulls[1].pull(0, {})
    assert pulls[0]._listener is not None and pulls[1]._listener is None


def test_a_blocked_answer_delays_nobody_else(ranks):
    go_on = threading.Event()

    def handler(rank, request):
        if request["block"]:
            go_on.wait(LONG_S)
        return {}, []

    _, pulls = ranks(3, handler)
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(pulls[1].pull, 0, {"block": True})
        assert pulls[2].pull(0, {"block": False}) == ({}, [])
        assert pulls[1].pull(0, {"block": False}) == ({}, [])
        assert not blocked.done()
        go_on.set()
        assert blocked.result(LONG_S) == ({}, [])


def test_what_a_handler_raises_is_raised_at_the_reader(ranks):
    def handler(rank, request):
        if request["ours"]:
            raise FarspanError("no such value", why="step 3 is over", hint="read it earlier")
        return {"not json": object()}, []

    channels, pulls = ranks(2, handler)
    with pytest.raises(RemoteError) as caught:
        pulls[0].pull(1, {"ours": True})
    assert caught.value.what == "rank 1 could not answer: FarspanError: no such value"
    assert (caught.value.why, caught.value.hint, caught.value.rank) == ("step 3 is over", "read it earlier", 1)
    assert "in handler" in caught.value.remote_traceback
    with pytest.raises(RemoteError, match="TypeError"):
        pulls[0].pull(1, {"ours": False})
    assert channels[0].failure is None


def test_a_late_answer_is_an_error_and_no_answer_to_what_is_asked_next(ranks):
    go_on = threading.Event()

    def handler(rank, request):
        if request["name"] == "late":
            go_on.wait(LONG_S)
        return request, [torch.zeros(MIB)]

    _, pulls = ranks(2, handler, SHORT_S)
    with pytest.raises(DeadlineError, match=r"rank 0 waited 0.05 s for rank 1 to answer \{\"name\": \"late\"\}"):
        pulls[0].pull(1, {"name": "late"})
    pulls[0]._deadline_s = LONG_S
    go_on.set()
    assert pulls[0].pull(1, {"name": "next"})[0] == {"name": "next"}
    assert len(pulls[0]._sockets) == 1


def test_a_slow_answer_is_not_a_late_one(ranks, monkeypatch):
    """The deadline is for silence: a large tensor over a slow link may take longer."""
    data = torch.zeros(MIB, dtype=torch.uint8)
    _, pulls = ranks(2, lambda rank, request: ({}, [data]), 1.0)
    paused = threading.Event()

    def slowly(sock, buffers):
        for part in [
            memoryview(buffer)[at : at + (MIB >> 2)] for buffer in buffers for at in range(0, len(buffer), MIB >> 2)
        ]:
            paused.wait(0.4)
            sock.sendall(part)

    monkeypatch.setattr("farspan.comm.pulls.listener.send_all", slowly)
    assert torch.equal(pulls[0].pull(1, {})[1][0], data)


def test_a_reader_that_is_stopped_for_a_while_gets_all(ranks, monkeypatch):
    monkeypatch.setattr("farspan.comm.pulls.listener._IDLE_S", 0.05)
    _, pulls = ranks(2, lambda rank, request: ({}, [torch.ones(64 * MIB, dtype=torch.uint8)]))
    sock, reader = join(Client(0, 2, "secret", 1, service_of(1)), tuple(pulls[1].listen()["address"]), LONG_S)
    with sock:
        send_request(sock, {})
        threading.Event().wait(0.5)  # longer than the system's buffers last
        _, (found,) = read_answer(sock, reader)
    assert found.all()


def test_an_idle_connection_that_the_owner_has_closed_is_made_anew(ranks, monkeypatch):
    monkeypatch.setattr("farspan.comm.pulls.listener._IDLE_S", 0.01)
    _, pulls = ranks(2, of_rank)
    pulls[0].pull(1, {})
    ((sock, _),) = pulls[0]._idle.values()
    assert sock.recv(1, socket.MSG_PEEK) == b""  # closed
    assert pulls[0].pull(1, {"again": 1})[0] == {"from": 1, "again": 1}


def test_few_idle_connections_are_kept(ranks, monkeypatch):
    monkeypatch.setattr("farspan.comm.pulls.pulls._MOST_IDLE", 2)
    _, pulls = ranks(5, of_rank)
    for rank in (1, 2, 3, 4, 3):
        pulls[0].pull(rank, {})
    assert list(pulls[0]._idle) == [4, 3]
    assert len(pulls[0]._sockets) == 2


# -- ends -------------------------------------------------------------------------------------------------------------


def test_a_failure_wakes_who_waits_for_an_answer(ranks):
    began = threading.Event()

    def handler(rank, request):
        began.set()
        threading.Event().wait(1.0)
        return {}, []

    channels, pulls = ranks(3, handler)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(pulls[0].pull, 1, {})
        assert began.wait(LONG_S)
        channels[2].fail(ValueError("boom"))
        with pytest.raises(RemoteError, match="rank 2 failed: ValueError: boom"):
            asked.result(LONG_S)
    with pytest.raises(RemoteError, match="boom"):
        pulls[0].pull(1, {})


def test_a_failure_wakes_who_waits_to_be_let_in(ranks):
    channels, pulls = ranks(3, of_rank)
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        pulls[0]._addresses[1] = silent.getsockname()
        asked = pool.submit(pulls[0].pull, 1, {})
        with silent.accept()[0]:
            channels[2].fail(ValueError("boom"))
            with pytest.raises(RemoteError, match="boom"):
                asked.result(LONG_S)


def test_an_owner_that_has_ended_cannot_answer(ranks):
    began = threading.Event()

    def handler(rank, request):
        began.set()
        threading.Event().wait(0.2)
        return {}, []

    channels, pulls = ranks(2, handler)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(pulls[0].pull, 1, {})
        assert began.wait(LONG_S)
        channels[1].close(0)
        with pytest.raises(RemoteError, match="rank 1 has ended its program"):
            asked.result(LONG_S)
    with pytest.raises(RemoteError, match="rank 1 has ended its program"):
        pulls[0].pull(1, {})


def test_an_owner_that_breaks_off_without_an_end_is_named(ranks, monkeypatch):
    monkeypatch.setattr("farspan.comm.pulls.pulls._CAUSE_S", 0.1)

    def broken(sock, buffers):
        sock.sendall(buffers[0])
        raise OSError("broken on purpose")

    monkeypatch.setattr("farspan.comm.pulls.listener.send_all", broken)
    _, pulls = ranks(2, of_rank)
    with pytest.raises(RemoteError, match="rank 1 has broken off what it was answering") as caught:
        pulls[0].pull(1, {})
    assert caught.value.rank == 1


def test_closing_waits_for_an_answer_that_is_being_made(ranks):
    """A thread that is in torch when the interpreter ends aborts the process."""
    began, may_end, closed = threading.Event(), threading.Event(), threading.Event()

    def handler(rank, request):
        began.set()
        assert may_end.wait(LONG_S)
        return {}, []

    channels, pulls = ranks(2, handler)
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(pulls[0].pull, 1, {})
        assert began.wait(LONG_S)
        closing = pool.submit(lambda: (channels[1].close(LONG_S), closed.set()))
        assert not closed.wait(0.1)
        may_end.set()
        closing.result(LONG_S)
        assert isinstance(asked.exception(LONG_S), RemoteError)


def test_a_reader_that_goes_away_leaves_the_owner_as_it_was(ranks):
    channels, pulls = ranks(3, lambda rank, request: ({}, [torch.zeros(request["size"], dtype=torch.uint8)]))
    address = tuple(pulls[1].listen()["address"])
    sock, _ = join(Client(0, 3, "secret", 1, service_of(1)), address, LONG_S)
    send_all(sock, encode({"pull": {"size": 64 * MIB}}))
    assert sock.recv(1000)  # it is being sent, more than the system's buffers take
    sock.close()
    listener = pulls[1]._listener
    assert listener is not None
    for _ in range(2):
        assert pulls[2].pull(1, {"size": 5})[1][0].tolist() == [0] * 5
    assert channels[1].failure is None
    wait_until(lambda: len(listener._open) == 1)
