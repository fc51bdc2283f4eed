"""The side channel when something goes wrong or ends: failures, goodbyes, deadlines, strangers."""

import queue
import socket
import sys
import threading
import time

import pytest
from tests.support.side import LONG_S, SHORT_S, each, record, step

from farspan.control.channel import SideChannel
from farspan.errors import DeadlineError, DivergenceError, FarspanError, RemoteError
from farspan.launch.raised.tracebacks import format_stack

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
            cause = ValueError("shapes do not match\nand more")
            cause.add_note("blocks.3 at train.py:41")
            channel.fail(cause)
            channel.wait_agreed(0, LONG_S)

    channels[3].start(0, 1)
    *errors, own = each(channels, act)
    for rank, error in enumerate(errors):
        assert isinstance(error, RemoteError)
        assert error.what == "rank 3 failed: ValueError: shapes do not match"
        assert error.why == "blocks.3 at train.py:41"
        assert error.rank == 3 and "and more" in error.remote_traceback
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


def test_who_has_failed_waits_until_the_others_know_and_not_for_what_they_do(ranks):
    """Rank 0 stayed for four seconds, in silence, while another rank was in a long computation."""
    channels = ranks(3)
    channels[0].fail(ValueError("shapes do not match"))
    began = time.monotonic()
    channels[0].close(linger_s=LONG_S)
    assert time.monotonic() - began < LONG_S / 2
    for channel in channels[1:]:  # at their leisure
        with pytest.raises(RemoteError, match="rank 0 failed: ValueError: shapes do not match"):
            channel.request(0, {}, LONG_S)


@pytest.mark.parametrize("what", ["answer", "failure"])
def test_closing_waits_for_what_a_thread_is_doing(ranks, what):
    """One that is in torch when the interpreter ends aborts the process."""
    channels = ranks(2)
    began, may_end, closed = threading.Event(), threading.Event(), threading.Event()

    def busy(_):
        began.set()
        assert may_end.wait(LONG_S)
        return {}

    channels[1].on_failure = busy
    channels[1].serve(busy)

    def act(channel):
        channel.request(1, {}, LONG_S) if what == "answer" else channel.fail(ValueError("boom"))

    acting = threading.Thread(target=lambda: each(channels[:1], act))
    acting.start()
    assert began.wait(LONG_S)
    closing = threading.Thread(target=lambda: (channels[1].close(LONG_S), closed.set()))
    closing.start()
    assert not closed.wait(0.1)
    may_end.set()
    assert closed.wait(LONG_S)
    for thread in (acting, closing):
        thread.join()


def test_a_rank_that_fails_first_lets_stopped_ones_go_on(ranks):
    channels = ranks(2)
    woken, heard = [], threading.Event()
    channels[1].wake = lambda: woken.append(heard.is_set())
    channels[0].on_failure = lambda error: heard.set()
    channels[1].fail(ValueError("the loader is empty"))
    assert heard.wait(LONG_S)
    assert woken == [False]


def test_a_hub_that_is_stopped_again_and_again_goes_on(ranks, monkeypatch):
    monkeypatch.setattr("farspan.control.channel._ENDING_S", 0.5)
    monkeypatch.setattr("farspan.control.channel._WAKE_S", 0.05)
    channels = ranks(2)
    woken = []
    channels[1].wake = lambda: woken.append(True)
    with monkeypatch.context() as patches:
        patches.setattr(channels[1]._link, "send", lambda header, payload=b"": None)  # it does not hear
        channels[1].fail(ValueError("the loader is empty"))
    assert len(woken) >= 3


def test_only_the_first_failure_counts(ranks):
    channels = ranks(3)
    channels[2].start(0, 1)
    channels[0].fail(ValueError("first"))
    channels[1].fail(ValueError("second"))
    with pytest.raises(RemoteError, match="rank 0 failed: ValueError: first"):
        channels[2].wait_agreed(0, LONG_S)


def test_a_rank_that_connects_late_still_learns_of_the_failure(ranks):
    (channel,) = ranks(2, absent=[1])
    channel.fail(ValueError("boom"))
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
    channels[2].close(LONG_S)
    assert closed.is_alive()
    channels[1].close(LONG_S)
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
    channels[1].serve(lambda body: {"lr": 0.1})

    def act(channel):
        if channel.rank == 0:  # Rank 0 alone saves the model at the end.
            channel._ask({"t": "status"}, LONG_S)
            assert channel.request(1, {}, LONG_S) == {"lr": 0.1}
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
    channels[1]._ask({"t": "status"}, LONG_S)  # The hub has seen rank 1's start.
    with pytest.raises(DeadlineError) as caught:
        channels[0].wait_agreed(17, SHORT_S)
    assert caught.value.what == "rank 0 waited 0.05 s for ranks 2, 3 to begin step 17"
    notes, place = caught.value.why.split("\nrank 2 is at\n")
    assert notes == "rank 2: has done nothing yet\nrank 3: has never connected"
    assert "in test_a_late_step_names_who_is_missing" in place and "wait_agreed" in place
    assert channels[0].failure is None


def test_a_late_gather_names_who_is_missing(ranks):
    channels = ranks(3)
    each(channels, step(4))
    for channel in channels[1:]:
        channel.contribute("k", b"")
        channel._ask({"t": "status"}, LONG_S)
    with pytest.raises(DeadlineError) as caught:
        channels[2].gathered("k", SHORT_S)
    assert caught.value.what == "rank 2 waited 0.05 s for rank 0 to give their part of 'k'"
    assert caught.value.why.startswith("rank 0: the last it did was: began step 4\nrank 0 is at\n")


def test_two_ranks_that_wait_for_each_other(ranks):
    """A call that all make together, made by rank 0 alone: it is said that rank 1 waits in turn, and what to do."""
    channels = ranks(2)
    channels[0].contribute("a batch", b"")
    with channels[1].waits.until(lambda: "to send", {"rank": 0}), pytest.raises(DeadlineError) as caught:
        channels[0].gathered("a batch", SHORT_S)
    assert caught.value.why.endswith("\nrank 1 in turn waits for rank 0")
    assert caught.value.hint.startswith("every rank makes the calls") and "py-spy" not in caught.value.hint


def test_where_a_late_rank_is_has_no_frames_of_farspans(ranks):
    channels = ranks(2)
    channels[1].contribute("a", b"")
    waiting = threading.Thread(target=lambda: each(channels[1:], lambda channel: channel.gathered("a", 1.0)))
    waiting.start()
    while channels[1].waits.current is None:
        threading.Event().wait(0.01)
    stacks = [stack for frame in sys._current_frames().values() if "gathered" in (stack := format_stack(frame, 16))]
    waiting.join()
    assert stacks and not any("/src/farspan/" in stack for stack in stacks)


def test_a_late_rank_that_does_not_say_where_it_is(ranks):
    channels = ranks(2)
    listener = channels[1]._link._on_frame
    channels[1]._link._on_frame = lambda frame: None if frame.header["t"] == "stack" else listener(frame)
    channels[0].start(0, 1)
    with pytest.raises(DeadlineError, match="rank 1 does not say where it is: its process is stopped"):
        channels[0].wait_agreed(0, SHORT_S)


def test_who_is_late_because_it_waits_for_another_rank(ranks):
    channels = ranks(4)

    def chain():
        return channels[0].late.behind(1)[0]

    with channels[1].waits.until(lambda: "", {"rank": 2}):
        waits, why = channels[0].late.behind(1)
        assert waits == ", which waits for rank 2"
        assert why.startswith("rank 2 does not go on") and "\nrank 2 is at\n" in why
        with channels[2].waits.until(lambda: "", {"step": 0}):  # which rank 3 has not begun
            each(channels[:3], lambda channel: channel.start(0, 1))
            channels[2]._ask({"t": "status"}, LONG_S)
            assert chain() == ", which waits for rank 2, which waits for rank 3"
            with channels[3].waits.until(lambda: "", {"rank": 1}):  # a ring would be an error of farspan's
                assert chain() == ", which waits for rank 2, which waits for rank 3"
        with channels[2].waits.until(lambda: "", {"rank": 0}):  # who asks
            assert chain() == ", which waits for rank 2"


def test_a_hub_that_is_silent_is_named_and_not_who_could_not_be_asked(ranks, monkeypatch):
    monkeypatch.setattr("farspan.control.late._STACK_S", SHORT_S)
    monkeypatch.setattr("farspan.control.late._STATUS_S", SHORT_S)
    channels = ranks(3)
    channels[2]._link.send = lambda header, payload=b"": None
    chain, why = channels[2].late.behind(1)
    assert chain == ", and rank 0 does not answer" and why.startswith("rank 0, where the hub is, does not answer")
    assert channels[2].late.behind(0) == ("", why)
    assert channels[2].late.place_of(1) == why
    error = channels[2].late.describe(5.0, "to begin step 4", {"step": 4})
    assert error.what == "rank 2 waited 5 s for the others to begin step 4, and rank 0 does not answer"


def test_a_long_wait_becomes_a_line_of_rank_0(ranks, monkeypatch):
    said = queue.SimpleQueue()
    monkeypatch.setattr("farspan.control.channel.write_line", said.put)
    monkeypatch.setattr("farspan.control.link.LOOK_S", 0.02)
    channels = ranks(3)
    channels[1].waits.long_s = 0.1
    waiting = threading.Thread(target=each, args=(channels[1:2], step(4)))
    waiting.start()
    assert said.get(timeout=LONG_S).splitlines() == [
        "farspan: rank 1 has waited 0 s for ranks 0, 2 to begin step 4",
        "  rank 0: has done nothing yet",
        "  rank 2: has done nothing yet",
    ]
    each([channels[0], channels[2]], step(4))
    waiting.join(LONG_S)
    assert said.empty()  # once for each wait


def test_a_long_wait_of_two_ranks_for_each_other_becomes_a_line_that_says_so(ranks, monkeypatch):
    said = queue.SimpleQueue()
    monkeypatch.setattr("farspan.control.channel.write_line", said.put)
    monkeypatch.setattr("farspan.control.link.LOOK_S", 0.02)
    channels = ranks(2)
    for channel in channels:
        channel.waits.long_s = 0.1
    with channels[0].waits.until(lambda: "to send", {"rank": 1}):
        assert "every rank makes" not in said.get(timeout=LONG_S)
        with channels[1].waits.until(lambda: "to give", {"rank": 0}):
            assert "\n  rank 0 has waited for rank 1: every rank makes the calls" in said.get(timeout=LONG_S)
