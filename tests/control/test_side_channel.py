"""The side channel between ranks that are threads of this process: agreement, gathers, questions."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.side import LONG_S, SHORT_S, each, record, step

from farspan.control.channel import SideChannel
from farspan.control.link import SocketLink, limit_sends
from farspan.control.wire import FrameReader
from farspan.errors import DeadlineError, DivergenceError, FarspanError, RemoteError

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
            channel._ask({"t": "status", "step": 5}, LONG_S)  # So the hub has it, and rank 0 is the last.
        begun.wait(LONG_S)
        if not channel.rank:
            channel.start(5, 10)
        channel.wait_agreed(5, LONG_S)

    errors = each(channels, act)
    for error in errors:
        assert isinstance(error, DivergenceError)
        assert error.what == "the ranks' programs differ at step 5"
        assert error.why == f"rank 0: blocks.3 at train.py:41\nranks 1, 2: {flush}"
        assert "same Python" in error.hint
        assert len(str(error).splitlines()) <= 8


def test_divergence_where_one_program_ends_earlier(ranks):
    channels = ranks(2)
    record(channels, [["embed", "head"], ["embed", "head", "head again at train.py:9"]])
    for error in each(channels, step(2, lambda rank: rank)):
        assert isinstance(error, DivergenceError)
        assert error.what == "the ranks' programs differ at step 2"
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
    assert [channel._gathers._by_key for channel in channels] == [{}, {}]
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
        channel.serve(lambda body, rank=channel.rank: {"from": rank, **body})

    def act(channel):
        return [channel.request(rank, {"q": channel.rank}, LONG_S) for rank in range(3)]

    for asker, answers in enumerate(each(channels, act)):
        assert answers == [{"from": rank, "q": asker} for rank in range(3)]


def test_a_blocked_handler_delays_nobody_else(ranks):
    channels = ranks(3)
    go_on = threading.Event()

    def handler(body):
        if body["block"]:
            go_on.wait(LONG_S)
        return body

    channels[0].serve(handler)
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(channels[1].request, 0, {"block": True}, LONG_S)
        channels[1].serve(lambda body: {})
        assert channels[2].request(0, {"block": False}, LONG_S) == {"block": False}
        assert each(channels, step(0)) == [None] * 3
        assert not blocked.done()
        go_on.set()
        assert blocked.result(LONG_S) == {"block": True}


def test_requests_wait_for_the_handler_to_be_set(ranks):
    channels = ranks(2)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(channels[0].request, 1, {}, LONG_S)
        channels[0]._ask({"t": "status", "rank": 1}, LONG_S)  # The request has passed the hub.
        channels[1].serve(lambda body: {"ok": True})
        assert early.result(LONG_S) == {"ok": True}


def test_what_a_handler_raises_is_raised_at_the_asker(ranks):
    channels = ranks(2)

    def handler(body):
        if body["ours"]:
            raise FarspanError("no such value", why="step 3 is over", hint="read it earlier")
        return {"not json": object()}

    channels[1].serve(handler)
    with pytest.raises(RemoteError) as caught:
        channels[0].request(1, {"ours": True}, LONG_S)
    assert caught.value.what == "rank 1 could not answer: FarspanError: no such value"
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
        return {"late": 1}

    channels[1].serve(handler)
    with pytest.raises(DeadlineError, match=r"rank 0 waited 0.05 s for rank 1 to answer \{\"name\": \"w\"\}"):
        channels[0].request(1, {"name": "w"}, SHORT_S)
    go_on.set()
    channels[1].serve(lambda body: {"ok": 1})
    assert channels[0].request(1, {}, LONG_S) == {"ok": 1}
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


# -- a world of one ----------------------------------------------------------------------------------------------------


def test_alone_there_are_no_threads():
    before = threading.active_count()
    channel = SideChannel.alone()
    channel.start(0, 1)
    channel.wait_agreed(0, 0)
    channel.contribute("k", b"me")
    assert channel.gathered("k", 0) == [b"me"]
    channel.forget("k")
    channel.serve(lambda body: body)
    assert channel.request(0, {"q": 1}, 0) == {"q": 1}
    channel.finish(0)
    channel.fail(ValueError("boom"))
    assert channel.failure is None
    assert threading.active_count() == before
    channel.close(0)


# -- waits ------------------------------------------------------------------------------------------------------------


def test_a_finalizer_waits_for_no_lock(ranks):
    (channel, _) = ranks(2)
    channel.contribute("k", b"")
    with ThreadPoolExecutor(1) as pool, channel._condition:  # as another rank's thread may hold it
        pool.submit(channel.forget_later, "k").result(LONG_S)
    channel.contribute("l", b"")
    assert channel._gathers._by_key["k"].forgotten


def test_a_send_that_nobody_reads_ends():
    ours, theirs = socket.socketpair()
    limit_sends(ours, SHORT_S)
    ended = threading.Event()
    link = SocketLink(ours, FrameReader(), [], "test")
    link.listen(lambda frame: None, lambda failure: ended.set())
    link.send({"t": "contribute", "key": "k"}, bytes(16 << 20))
    assert ended.wait(LONG_S)
    theirs.close()
