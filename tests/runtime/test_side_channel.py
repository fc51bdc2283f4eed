"""The side channel between ranks that are threads of this process, over real localhost sockets."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from farspan.errors import DeadlineError, DivergenceError, FarspanError, LaunchError, RemoteError
from farspan.runtime.side import SideChannel

LONG_S = 30.0
"""A deadline that only a bug reaches."""
SHORT_S = 0.05
"""A deadline that the test wants to reach."""


@pytest.fixture
def ranks():
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


# -- agreement --------------------------------------------------------------------------------------------------------


def test_all_ranks_agree_step_after_step(ranks):
    channels = ranks(4)
    for number in range(50):
        assert each(channels, step(number, 1000 + number)) == [None] * 4


def test_a_wait_for_an_earlier_step_returns(ranks):
    channels = ranks(2)
    each(channels, step(0))
    each(channels, step(1))
    channels[0].wait_agreed(0, 0)


def test_divergence_names_the_first_call_that_differs(ranks):
    channels = ranks(3)
    flush = "flush (opt.step) at train.py:50"
    record(channels, [["embed", "blocks.3 at train.py:41", flush], ["embed", flush], ["embed", flush]])

    begun = threading.Barrier(3)

    def act(channel):
        if channel.rank:
            channel.start(5, 11)
            channel._ask_status({"step": 5})  # So the hub has it, and rank 0 is the last.
        begun.wait(LONG_S)
        if not channel.rank:
            channel.start(5, 10)
        channel.wait_agreed(5, LONG_S)

    errors = each(channels, act)
    for error in errors:
        assert isinstance(error, DivergenceError)
        assert error.what == "the ranks' programs differ at step 5, call 1"
        assert error.why == f"rank 0: blocks.3 at train.py:41\nranks 1, 2: {flush}"
        assert "same Python" in error.hint
        assert len(str(error).splitlines()) <= 8


def test_divergence_where_one_program_ends_earlier(ranks):
    channels = ranks(2)
    record(channels, [["embed", "head"], ["embed", "head", "head again at train.py:9"]])
    for error in each(channels, step(2, lambda rank: rank)):
        assert isinstance(error, DivergenceError)
        assert error.what == "the ranks' programs differ at step 2, call 2"
        assert error.why == "rank 0: ends here (step begins)\nrank 1: head again at train.py:9"


def test_divergence_survives_a_history_that_raises(ranks):
    channels = ranks(2)
    channels[0].history = lambda step: 1 / 0
    for error in each(channels, step(0, lambda rank: rank)):
        assert isinstance(error, DivergenceError)
        assert "division by zero" in error.why


def test_steps_must_increase_and_be_begun():
    channel = SideChannel.alone()
    channel.start(3, 1)
    with pytest.raises(ValueError, match="after step 3"):
        channel.start(3, 1)
    with pytest.raises(ValueError, match="has not begun"):
        channel.wait_agreed(4, 0)


# -- gathers ----------------------------------------------------------------------------------------------------------


def test_gather_by_rank_read_by_some_ranks_some_times(ranks):
    channels = ranks(3)
    for channel in channels:
        for key in ("loss", "norm", "never read"):
            channel.contribute(key, f"{key} {channel.rank}".encode())
    expected = [b"loss 0", b"loss 1", b"loss 2"]
    assert channels[1].gathered("loss", LONG_S) == expected
    assert channels[1].gathered("loss", LONG_S) == expected
    assert channels[0].gathered("norm", LONG_S) == [b"norm 0", b"norm 1", b"norm 2"]


def test_forgotten_gathers_leave_nothing_behind(ranks):
    channels = ranks(2)
    channels[0].contribute("early", b"0")
    channels[0].forget("early")  # Its result is still to come.
    channels[1].contribute("early", b"1")
    for channel in channels:
        channel.contribute("later", b"")
    for channel in channels:
        channel.gathered("later", LONG_S)  # So "early" has come too.
        channel.forget("later")
    channels[1].forget("early")
    assert [channel._gathers for channel in channels] == [{}, {}]
    with pytest.raises(ValueError, match="forgotten"):
        channels[0].gathered("early", LONG_S)


def test_a_key_is_contributed_once():
    channel = SideChannel.alone()
    channel.contribute("k", b"")
    with pytest.raises(ValueError, match="before"):
        channel.contribute("k", b"")


def test_gather_that_an_ended_rank_left_out(ranks):
    channels = ranks(2)
    channels[0].contribute("k", b"")
    channels[1].close(0)
    with pytest.raises(DivergenceError, match="rank 1 has ended its program without giving a part of 'k'"):
        channels[0].gathered("k", LONG_S)


# -- questions --------------------------------------------------------------------------------------------------------


def test_requests_go_both_ways_and_to_oneself(ranks):
    channels = ranks(3)
    for channel in channels:
        channel.serve(lambda body, rank=channel.rank: ({"from": rank, **body}, bytes([rank])))

    def act(channel):
        return [channel.request(rank, {"q": channel.rank}, LONG_S) for rank in range(3)]

    for asker, answers in enumerate(each(channels, act)):
        assert answers == [({"from": rank, "q": asker}, bytearray([rank])) for rank in range(3)]


def test_a_payload_of_64_mib_arrives_whole_while_steps_go_on(ranks):
    channels = ranks(3)
    payload = os.urandom(1 << 20) * 64 + b"end"
    channels[1].serve(lambda body: ({}, memoryview(payload)))
    with ThreadPoolExecutor(1) as pool:
        pulled = pool.submit(channels[2].request, 1, {}, LONG_S)
        for number in range(20):
            assert each(channels, step(number)) == [None] * 3
        answer, received = pulled.result(LONG_S)
    assert answer == {}
    assert isinstance(received, bytearray)
    assert received == payload
    received.append(0)  # Nobody else holds a view of it.
    assert channels[1]._calls._transfers == {}


def test_a_blocked_handler_delays_nobody_else(ranks):
    channels = ranks(3)
    go_on = threading.Event()

    def handler(body):
        if body["block"]:
            go_on.wait(LONG_S)
        return body, b""

    channels[0].serve(handler)
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(channels[1].request, 0, {"block": True}, LONG_S)
        channels[1].serve(lambda body: ({}, b"one"))
        assert channels[2].request(0, {"block": False}, LONG_S)[0] == {"block": False}
        assert each(channels, step(0)) == [None] * 3
        assert not blocked.done()
        go_on.set()
        assert blocked.result(LONG_S)[0] == {"block": True}


def test_requests_wait_for_the_handler_to_be_set(ranks):
    channels = ranks(2)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(channels[0].request, 1, {}, LONG_S)
        channels[0]._ask_status({"rank": 1})  # The request has passed the hub.
        channels[1].serve(lambda body: ({"ok": True}, b""))
        assert early.result(LONG_S)[0] == {"ok": True}


def test_what_a_handler_raises_is_raised_at_the_asker(ranks):
    channels = ranks(2)

    def handler(body):
        if body["ours"]:
            raise FarspanError("no such value", why="step 3 is over", hint="read it earlier")
        return {"not json": object()}, b""

    channels[1].serve(handler)
    with pytest.raises(RemoteError) as caught:
        channels[0].request(1, {"ours": True}, LONG_S)
    assert caught.value.what == "rank 1 could not answer: no such value"
    assert (caught.value.why, caught.value.hint, caught.value.rank) == ("step 3 is over", "read it earlier", 1)
    assert "in handler" in caught.value.remote_traceback
    with pytest.raises(RemoteError, match="TypeError"):
        channels[0].request(1, {"ours": False}, LONG_S)
    assert channels[0].failure is None


def test_a_late_answer_is_dropped(ranks):
    channels = ranks(2)
    go_on = threading.Event()

    def handler(body):
        go_on.wait(LONG_S)
        return {}, bytes(20 << 20)

    channels[1].serve(handler)
    with pytest.raises(DeadlineError, match=r"rank 0 waited 0.05 s for rank 1 to answer \{\"name\": \"w\"\}"):
        channels[0].request(1, {"name": "w"}, SHORT_S)
    go_on.set()
    channels[1].serve(lambda body: ({"ok": 1}, b""))
    assert channels[0].request(1, {}, LONG_S)[0] == {"ok": 1}
    assert channels[0]._calls._questions == {}


def test_a_request_to_an_ended_rank_fails(ranks):
    channels = ranks(2)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(channels[0].request, 1, {}, LONG_S)
        channels[1].close(0)
        with pytest.raises(RemoteError, match="rank 1 has ended its program"):
            asked.result(LONG_S)
    with pytest.raises(RemoteError, match="rank 1 has ended its program"):
        channels[0].request(1, {}, LONG_S)


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_failure_reaches_everyone_and_wakes_every_wait(ranks):
    channels = ranks(4)
    told = [[] for _ in channels]
    called = [threading.Event() for _ in channels]
    for rank, channel in enumerate(channels):

        def on_failure(error, rank=rank):
            told[rank].append((error, threading.current_thread().name))
            called[rank].set()

        channel.on_failure = on_failure
    channels[1].contribute("k", b"")
    channels[0].start(0, 1)

    def act(channel):
        if channel.rank == 0:
            channel.wait_agreed(0, LONG_S)
        elif channel.rank == 1:
            channel.gathered("k", LONG_S)
        elif channel.rank == 2:
            channel.request(0, {}, LONG_S)
        else:
            channel.fail("shapes do not match", "blocks.3 at train.py:41", "Traceback: all of it", "ValueError")
            channel.wait_agreed(0, LONG_S)

    channels[3].start(0, 1)
    *errors, own = each(channels, act)
    for rank, error in enumerate(errors):
        assert isinstance(error, RemoteError)
        assert error.what == "rank 3 failed: shapes do not match"
        assert error.why == "ValueError: blocks.3 at train.py:41"
        assert (error.rank, error.remote_traceback) == (3, "Traceback: all of it")
        assert "rank 3's log" in error.hint
        assert called[rank].wait(LONG_S)
        ((seen, thread),) = told[rank]
        assert seen is channels[rank].failure
        assert thread == f"farspan-side-{rank}"
        with pytest.raises(RemoteError):
            channels[rank].wait_agreed(0, 0) if rank == 0 else channels[rank].request(0, {}, 0)
    assert not isinstance(own, RemoteError)
    assert channels[3].failure is None
    assert told[3] == []


def test_only_the_first_failure_counts(ranks):
    channels = ranks(3)
    channels[2].start(0, 1)
    channels[0].fail("first", "", "", "")
    channels[1].fail("second", "", "", "")
    with pytest.raises(RemoteError, match="rank 0 failed: first"):
        channels[2].wait_agreed(0, LONG_S)


def test_a_rank_that_connects_late_still_learns_of_the_failure(ranks):
    (channel,) = ranks(2, absent=[1])
    channel.fail("boom", "", "", "")
    late = SideChannel.connect(1, 2, channel._server.address, "secret", LONG_S)
    late.start(0, 1)
    with pytest.raises(RemoteError, match="boom"):
        late.wait_agreed(0, LONG_S)
    late.close(0)


def test_a_lost_connection_is_a_death(ranks):
    channels = ranks(3)
    channels[0].start(0, 1)
    channels[1]._link._sock.shutdown(socket.SHUT_RDWR)
    with pytest.raises(RemoteError, match="rank 1 died") as caught:
        channels[0].wait_agreed(0, LONG_S)
    assert caught.value.rank == 1
    assert "out-of-memory" in caught.value.hint


# -- goodbyes ---------------------------------------------------------------------------------------------------------


def test_rank_0_stays_until_all_others_have_gone(ranks):
    channels = ranks(3)
    closed = threading.Thread(target=channels[0].close, args=(LONG_S,))
    closed.start()
    channels[1].close(LONG_S)
    assert closed.is_alive()
    channels[2].close(LONG_S)
    closed.join(LONG_S)
    assert not closed.is_alive()
    assert not channels[0]._server._thread.is_alive()
    channels[0].close(LONG_S)  # Once more does nothing.
    with pytest.raises(RuntimeError, match="closed"):
        channels[0].request(1, {}, LONG_S)


def test_a_goodbye_while_another_rank_begins_a_step(ranks):
    channels = ranks(2)
    record(channels, [["embed", "flush at train.py:50"], []])
    each(channels, step(0))
    channels[1].close(LONG_S)
    channels[0].start(1, 1)
    with pytest.raises(DivergenceError) as caught:
        channels[0].wait_agreed(1, LONG_S)
    assert caught.value.what == "rank 1 has ended its program, rank 0 waits in step 1 at flush at train.py:50"


def test_who_outlives_the_hub_is_told(ranks):
    channels = ranks(2)
    channels[1].start(0, 1)
    channels[0].close(linger_s=0)
    with pytest.raises(FarspanError, match="rank 0 has ended its program"):
        channels[1].wait_agreed(0, LONG_S)


def test_a_finished_rank_answers_until_all_have_finished(ranks):
    channels = ranks(3)
    channels[1].serve(lambda body: ({}, b"weights"))

    def act(channel):
        if channel.rank == 0:  # Rank 0 alone saves the model at the end.
            channel._ask_status({})
            assert channel.request(1, {}, LONG_S)[1] == b"weights"
        channel.finish(LONG_S)

    assert each(channels, act) == [None] * 3


def test_a_step_after_another_rank_has_finished(ranks):
    channels = ranks(2)

    def act(channel):
        return channel.finish(LONG_S) if channel.rank else step(0)(channel)

    for error in each(channels, act):
        assert isinstance(error, DivergenceError)
        assert error.what == "rank 1 has ended its program, rank 0 waits in step 0"


# -- deadlines --------------------------------------------------------------------------------------------------------


def test_a_late_step_names_who_is_missing(ranks):
    channels = ranks(4, absent=[3])
    for channel in channels[:2]:
        channel.start(17, 1)
    channels[1]._ask_status({})  # The hub has seen rank 1's start.
    with pytest.raises(DeadlineError) as caught:
        channels[0].wait_agreed(17, SHORT_S)
    assert caught.value.what == "rank 0 waited 0.05 s for ranks 2, 3 to begin step 17"
    assert caught.value.why == "rank 2: has done nothing yet\nrank 3: has never connected"
    assert channels[0].failure is None


def test_a_late_gather_names_who_is_missing(ranks):
    channels = ranks(3)
    each(channels, step(4))
    for channel in channels[1:]:
        channel.contribute("k", b"")
        channel._ask_status({})
    with pytest.raises(DeadlineError) as caught:
        channels[2].gathered("k", SHORT_S)
    assert caught.value.what == "rank 2 waited 0.05 s for rank 0 to give their part of 'k'"
    assert caught.value.why == "rank 0: the last it did was: began step 4"


# -- strangers and worlds of one --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "world_size", "token", "why"),
    [
        (1, 2, "guess", "wrong token"),
        (1, 3, "secret", "expects 3"),
        (0, 2, "secret", "before"),
        (7, 2, "secret", "no rank"),
    ],
)
def test_who_does_not_belong_is_refused(ranks, rank, world_size, token, why):
    (channel,) = ranks(2, absent=[1])
    with pytest.raises(LaunchError, match=why):
        SideChannel.connect(rank, world_size, channel._server.address, token, LONG_S)
    assert channel.failure is None


def test_strangers_do_no_harm(ranks):
    channels = ranks(2)
    strangers = [socket.create_connection(channels[0]._server.address) for _ in range(150)]
    for stranger in strangers[::2]:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    assert each(channels, step(0)) == [None] * 2
    for stranger in strangers:
        stranger.close()


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with pytest.raises(LaunchError, match="cannot reach"):
        SideChannel.connect(1, 2, address, "secret", LONG_S)


def test_nobody_answers():
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(DeadlineError, match="answer its hello"):
        SideChannel.connect(1, 2, server.getsockname(), "secret", SHORT_S)


def test_alone_there_are_no_threads():
    before = threading.active_count()
    channel = SideChannel.alone()
    channel.start(0, 1)
    channel.wait_agreed(0, 0)
    channel.contribute("k", b"me")
    assert channel.gathered("k", 0) == [b"me"]
    channel.forget("k")
    channel.serve(lambda body: (body, memoryview(b"payload")))
    assert channel.request(0, {"q": 1}, 0) == ({"q": 1}, bytearray(b"payload"))
    channel.finish(0)
    channel.fail("boom", "", "", "")
    assert channel.failure is None
    assert threading.active_count() == before
    channel.close(0)
