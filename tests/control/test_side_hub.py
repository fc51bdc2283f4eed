"""The hub's state machine: messages in, messages out; no sockets, no threads."""

import json

import pytest

from farspan.control.hub.divergence import describe_difference, first_difference
from farspan.control.hub.hub_state import Hub
from farspan.control.text import name_ranks
from farspan.control.tree.blocks import MAX_PARTS_BYTES, parts_by_rank

EVERYONE = None
"""All that still listen; who has failed, or has ended, does not look at what comes."""


def joined(world_size):
    hub = Hub(world_size)
    for rank in range(world_size):
        assert hub.on_joined(rank) == []
    return hub


def start(hub, rank, step, digest):
    return hub.on_message(rank, {"t": "start", "step": step, "digest": digest})


def show(hub, rank, query, *descriptions):
    entries = [(hash(text) & 0xFFFF, text) for text in descriptions]
    return hub.on_message(rank, {"t": "history", "query": query}, json.dumps(entries).encode())


def kinds(messages):
    return [(message.to, message.header["t"]) for message in messages]


def failure(messages):
    (message,) = [message for message in messages if message.header["t"] == "failure"]
    return message.to, message.header


def test_agreed_only_when_the_last_rank_has_begun():
    hub = joined(3)
    assert start(hub, 0, 7, 1) == []
    assert start(hub, 2, 7, 1) == []
    (message,) = start(hub, 1, 7, 1)
    assert message.to is EVERYONE
    assert message.header == {"t": "agreed", "step": 7}


def test_a_rank_may_run_ahead():
    hub = joined(2)
    assert start(hub, 0, 0, 1) == []
    assert start(hub, 0, 1, 2) == []
    assert [m.header["step"] for m in start(hub, 1, 0, 1)] == [0]
    assert [m.header["step"] for m in start(hub, 1, 1, 2)] == [1]


def test_different_digests_show_the_first_call_that_differs():
    hub = joined(3)
    start(hub, 0, 5, 10)
    asked = start(hub, 1, 5, 11)
    assert kinds(asked) == [((0,), "history"), ((1,), "history")]
    query = asked[0].header["query"]
    assert start(hub, 2, 5, 11) == []
    assert show(hub, 0, query, "embed at a.py:1", "blocks.3 at train.py:41") == []
    to, error = failure(show(hub, 1, query, "embed at a.py:1", "flush (opt.step) at train.py:50"))
    assert to is EVERYONE
    assert error["kind"] == "DivergenceError"
    assert error["what"] == "the ranks' programs differ at step 5"
    assert error["why"] == "rank 0: blocks.3 at train.py:41\nrank 1: flush (opt.step) at train.py:50"
    assert "same branches, same batches, same order" in error["hint"]


def test_different_step_numbers_differ():
    hub = joined(2)
    start(hub, 0, 5, 10)
    query = start(hub, 1, 6, 10)[0].header["query"]
    show(hub, 0, query, "embed")
    _, error = failure(show(hub, 1, query, "embed"))
    assert error["what"] == "the ranks' programs differ: they begin steps 5, 6 together"
    assert "rank 0: step 5" in error["why"]
    assert "rank 1: step 6" in error["why"]


def test_a_dispute_ends_when_a_rank_dies_before_it_answers():
    hub = joined(2)
    start(hub, 0, 5, 10)
    start(hub, 1, 5, 11)
    to, error = failure(hub.on_gone(1))
    assert to is EVERYONE
    assert error["what"].startswith("rank 1 died")


def test_goodbye_while_another_rank_begins_a_step():
    hub = joined(2)
    start(hub, 0, 3, 1)
    messages = hub.on_message(1, {"t": "bye"})
    assert kinds(messages) == [(EVERYONE, "ended"), ((0,), "history")]
    to, error = failure(show(hub, 0, messages[1].header["query"], "embed", "flush at train.py:50"))
    assert to is EVERYONE
    assert error["what"] == "rank 1 has ended its program, rank 0 waits in step 3 at flush at train.py:50"


def test_a_rank_that_leaves_the_loop_is_told_to_go_through_it_as_often():
    last = ["optimizer.step(), at train.py:50, in <module>"]
    for words, how in [
        ("", "has come past its program's last line"),
        ("sys.exit(0) at a.py:7", "has called sys.exit(0)"),
    ]:
        hub = joined(2)
        start(hub, 0, 3, 1)
        (asked,) = hub.on_message(1, {"t": "finish", "step": 3, "digest": 0, "end": [words, *last]})
        _, error = failure(show(hub, 0, asked.header["query"], "embed", f"end of the step: {last[0]}"))
        assert f"rank 1 {how}" in error["why"] and f",\nafter {last[0]}." in error["why"]
        assert error["hint"].startswith("does a rank leave the loop sooner")


def test_nothing_is_said_of_the_end_of_a_program_that_is_not_known():
    hub = joined(2)
    start(hub, 0, 3, 1)
    (asked,) = hub.on_message(1, {"t": "finish"})
    _, error = failure(show(hub, 0, asked.header["query"], "embed", "end of the step: flush at train.py:50"))
    assert error["why"] == "a step needs every rank, and rank 1 will not begin step 3"


def test_goodbye_before_another_rank_begins_a_step():
    hub = joined(2)
    hub.on_message(1, {"t": "bye"})
    assert kinds(start(hub, 0, 3, 1)) == [((0,), "history")]


def test_goodbye_after_the_last_step_is_no_failure():
    hub = joined(2)
    start(hub, 0, 3, 1)
    start(hub, 1, 3, 1)
    assert kinds(hub.on_message(1, {"t": "bye"})) == [(EVERYONE, "ended")]
    assert hub.on_gone(1) == []
    assert not hub.failed


def test_finished_ranks_still_pass_on_answers():
    hub = joined(2)
    assert hub.on_message(1, {"t": "finish"}) == []
    (message,) = hub.on_message(0, {"t": "request", "to": 1, "id": 4, "body": {"a": 1}})
    assert (message.to, message.header) == ((1,), {"t": "request", "id": 4, "body": {"a": 1}, "from": 0})
    assert kinds(hub.on_message(0, {"t": "finish"})) == [(EVERYONE, "finished")]


def test_a_gather_is_sent_to_all_by_rank():
    hub = joined(3)
    for rank in (2, 0):
        assert hub.on_message(rank, {"t": "contribute", "key": "k"}, bytes([rank] * rank)) == []
    (message,) = hub.on_message(1, {"t": "contribute", "key": "k"}, b"\1")
    assert message.to is EVERYONE
    assert parts_by_rank(message.payload, 3) == [b"", b"\1", b"\2\2"]
    assert not hub._gathers


@pytest.mark.parametrize("bye_first", [True, False])
def test_a_gather_without_an_ended_rank_is_void(bye_first):
    hub = joined(2)
    if bye_first:
        hub.on_message(1, {"t": "bye"})
        messages = hub.on_message(0, {"t": "contribute", "key": "k"}, b"")
    else:
        hub.on_message(0, {"t": "contribute", "key": "k"}, b"")
        messages = hub.on_message(1, {"t": "bye"})
    (void,) = [message for message in messages if message.header["t"] == "void"]
    assert void.to == (0,)
    assert void.header["what"] == "rank 1 has ended its program without giving a part of 'k'"


def test_first_failure_wins():
    hub = joined(3)
    messages = hub.on_message(2, {"t": "fail", "what": "boom", "why": "at a.py:3", "hint": "another", "traceback": "T"})
    to, error = failure(messages)
    assert to is EVERYONE
    assert (error["what"], error["why"], error["rank"]) == ("rank 2 failed: boom", "at a.py:3", 2)
    assert error["traceback"] == "T" and "another" in error["hint"] and "rank 2's log" in error["hint"]
    assert kinds(messages)[-1] == ((2,), "noted")
    assert hub.on_gone(1) == []
    assert kinds(hub.on_message(0, {"t": "fail", "what": "later"})) == [((0,), "noted")]


def test_a_silent_rank_is_a_lost_link_and_is_told_too():
    hub = joined(3)
    to, header = failure(hub.on_silent(2))
    assert to is EVERYONE and header["rank"] == 2
    assert "the link to rank 2 is lost" in header["what"]
    assert hub.on_gone(2) == []  # its connection is closed then, which is no death


def test_status_names_the_missing_ranks_and_what_they_did_last():
    hub = Hub(4)
    for rank in (0, 1, 2):
        hub.on_joined(rank)
    start(hub, 0, 17, 1)
    start(hub, 1, 16, 1)
    (message,) = hub.on_message(0, {"t": "status", "id": 9, "step": 17})
    assert message.to == (0,)
    assert message.header["missing"] == [1, 2, 3]
    assert message.header["notes"] == [
        "rank 1: the last it did was: began step 16",
        "rank 2: has done nothing yet",
        "rank 3: has never connected",
        "the programs differ; yet to show what was recorded: ranks 0, 1",
    ]


def test_unknown_messages_are_ignored():
    assert joined(2).on_message(0, {"t": "heartbeat"}) == []


def test_first_difference_counts_an_end_as_different():
    a, b = (1, "a"), (2, "b")
    assert first_difference([[a, b], [a, b]]) is None
    assert first_difference([[a, b], [a]]) == 1
    assert first_difference([[a, b], [b]]) == 0
    assert first_difference([]) is None


def test_many_variants_stay_within_a_few_lines():
    starts = {rank: (0, rank) for rank in range(10)}
    histories = {rank: [(rank, f"call {rank}")] for rank in range(10)}
    _, why, _ = describe_difference(starts, histories)  # type: ignore[arg-type]
    assert why.splitlines()[-1] == "and 7 other variants"
    assert len(why.splitlines()) == 4


def test_names_of_ranks():
    assert name_ranks([4]) == "rank 4"
    assert name_ranks([2, 1]) == "ranks 1, 2"
    assert name_ranks([0, 1, 2, 3, 9]) == "ranks 0-3, 9"


def test_parts_that_are_too_large_together_end_the_run():
    hub = joined(3)
    large = bytes(MAX_PARTS_BYTES // 2)
    assert hub.on_message(0, {"t": "contribute", "key": "k"}, large) == []
    assert hub.on_message(1, {"t": "contribute", "key": "k"}, large) == []
    _, error = failure(hub.on_message(2, {"t": "contribute", "key": "k"}, b"one more"))
    assert error["what"].startswith("the ranks' parts of 'k' have 66060296 bytes")


def test_what_ranks_did_last_is_known_after_any_number_of_steps():
    hub = joined(3)
    for number in range(2_000):
        for rank in range(3):
            start(hub, rank, number, 1)
    hub.on_message(2, {"t": "contribute", "key": "k"}, b"")
    for _ in range(6_000):
        hub.on_message(0, {"t": "request", "to": 1, "id": 0, "body": {}})
    (message,) = hub.on_message(0, {"t": "status", "id": 1, "step": 2_000})
    assert message.header["notes"] == [
        "rank 0: the last it did was: asked rank 1",
        "rank 1: the last it did was: began step 1999",
        "rank 2: the last it did was: gave its part of 'k'",
    ]
    assert len(hub._events) < 6_000
