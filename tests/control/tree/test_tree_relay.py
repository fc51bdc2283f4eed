"""A relay's state machine: what several ranks say becomes one message, and nothing is held back for long."""

import pytest

from farspan.control.hub.hub_state import Hub
from farspan.control.tree.blocks import parts_by_rank
from farspan.control.tree.numbers import children, client_towards, host_of, ranks_below
from farspan.control.tree.relay import Relay
from farspan.control.wire import ProtocolError

WORLD = 40
"""Rank 1 has the children 33 to 39."""
BELOW_1 = [1, *range(33, 40)]
DATA = (1, 2, 3)


def start(relay, rank, step, digest=5, data=DATA):
    return relay.on_message(rank, {"t": "start", "step": step, "digest": digest, "data": data})


def headers(messages):
    assert all(message.is_for_parent for message in messages)
    return [message.header for message in messages]


def begun(step, ranks, digest=5, data=DATA):
    return {"t": "start", "ranks": ranks, "step": step, "digest": digest, "data": data}


def test_the_tree_is_a_star_of_up_to_33_ranks():
    for world_size in (2, 8, 33):
        assert {host_of(rank, world_size) for rank in range(world_size)} == {0}
    assert [rank for rank in range(1_024) if host_of(rank, 1_024) == rank] == list(range(32))
    assert ranks_below(1, WORLD) == BELOW_1
    assert client_towards(39, 0) == 1 and client_towards(39, 1) == 39 and client_towards(39, 2) is None
    assert max(len(children(rank, 1_000_000)) for rank in (0, 1, 700)) == 32


def test_what_all_below_begin_is_one_message():
    relay = Relay(1, WORLD)
    for rank in BELOW_1[1:]:
        assert start(relay, rank, 7) == []
    assert headers(start(relay, 1, 7)) == [begun(7, [(1, 1), (33, 39)])]


def test_what_is_held_back_goes_on_after_two_looks_and_the_rest_with_the_last():
    relay = Relay(1, WORLD)
    start(relay, 33, 7)
    start(relay, 33, 8)
    relay.on_message(34, {"t": "contribute", "key": "k"}, b"34")
    assert relay.on_tick() == []
    first, second, part = headers(relay.on_tick())
    assert (first, second) == (begun(7, [(33, 33)]), begun(8, [(33, 33)]))
    assert part == {"t": "contribute", "key": "k", "is_merged": True}
    assert relay.on_tick() == []
    for rank in BELOW_1[2:]:
        start(relay, rank, 7)
    assert headers(start(relay, 1, 7)) == [begun(7, [(1, 1), (34, 39)])]


def test_a_difference_is_passed_on_at_once_behind_what_came_before_it():
    relay = Relay(1, WORLD)
    start(relay, 33, 7)
    start(relay, 33, 8)
    start(relay, 34, 7)
    assert headers(start(relay, 34, 8, digest=6)) == [
        begun(7, [(33, 34)]),
        begun(8, [(33, 33)]),
        begun(8, [(34, 34)], digest=6),
    ]


def test_data_agree_where_one_grid_does():
    relay = Relay(1, WORLD)
    for rank in BELOW_1[1:]:
        assert start(relay, rank, 7, data=(1, rank, 3)) == []
    assert headers(start(relay, 1, 7, data=(1, 2, 4))) == [begun(7, [(1, 1), (33, 39)], data=(1, None, None))]
    start(relay, 33, 8, data=(1, 2, 3))
    assert len(start(relay, 34, 8, data=(4, 5, 6))) == 2


def test_parts_are_put_together_and_equal_ones_are_sent_once():
    relay, hub = Relay(1, WORLD), Hub(WORLD)
    for key, part_of in (("equal", lambda rank: b"digest" * 100), ("own", lambda rank: bytes([rank] * 10 * rank))):
        for rank in BELOW_1[1:]:
            assert relay.on_message(rank, {"t": "contribute", "key": key}, part_of(rank)) == []
        (message,) = relay.on_message(1, {"t": "contribute", "key": key}, part_of(1))
        assert (len(message.payload) < 700) == (key == "equal")
        assert hub.on_message(1, message.header, message.payload) == []
        for rank in [0, *range(2, 32)]:
            assert hub.on_message(rank, {"t": "contribute", "key": key}, part_of(rank)) == []
        (gathered,) = hub.on_message(32, {"t": "contribute", "key": key}, part_of(32))
        assert parts_by_rank(gathered.payload, WORLD) == [part_of(rank) for rank in range(WORLD)]


def test_a_rank_that_ends_has_given_what_it_gave():
    relay = Relay(1, WORLD)
    relay.on_message(33, {"t": "contribute", "key": "k"}, b"33")
    assert [header["t"] for header in headers(relay.on_message(33, {"t": "bye"}))] == ["contribute", "bye"]


def test_a_result_for_one_rank_goes_to_that_one():
    relay, hub = Relay(1, WORLD), Hub(WORLD)
    header = {"t": "contribute", "key": "k", "for": 35}
    for rank in BELOW_1[1:]:
        relay.on_message(rank, header, b"")
    (message,) = relay.on_message(1, header, b"")
    hub.on_message(1, message.header, message.payload)
    for rank in [0, *range(2, 32)]:
        hub.on_message(rank, header, b"")
    (gathered,) = hub.on_message(32, header, b"")
    assert gathered.to == (35,)
    (passed_on,) = relay.on_parent({**gathered.header, "to": [35]}, gathered.payload)
    assert passed_on.to == (35,) and "to" not in passed_on.header


def test_questions_go_the_shortest_way():
    relay = Relay(1, WORLD)
    (across,) = relay.on_message(33, {"t": "request", "to": 39, "id": 1, "body": {}})
    assert (across.to, across.header) == ((39,), {"t": "request", "id": 1, "body": {}, "from": 33})
    (up,) = headers(relay.on_message(33, {"t": "request", "to": 2, "id": 1, "body": {}}))
    assert up == {"t": "request", "to": 2, "id": 1, "body": {}, "from": 33}


def test_nobody_speaks_for_a_rank_that_is_not_below_it():
    hub = Hub(WORLD)
    for header in ({"t": "fail", "from": 39}, {"t": "start", "ranks": [[2, 3]], "step": 0, "digest": 0}):
        with pytest.raises(ProtocolError):
            hub.on_message(2, header)
    for ranges in ([[33, 33], [33, 33]], [[33, 40]], [[-1, 1]], [[35, 34]], []):
        with pytest.raises(ProtocolError):
            hub.on_message(1, {"t": "start", "ranks": ranges, "step": 0, "digest": 0})
    with pytest.raises(ProtocolError):
        Relay(1, WORLD).on_message(33, {"t": "bye", "from": 34})


def test_who_can_no_longer_be_reached_is_lost_with_the_relay():
    hub = Hub(WORLD)
    (failure,) = hub.on_gone(1)
    assert failure.header["what"].startswith("rank 1 died")
    assert hub.died == set(BELOW_1)
    hub = Hub(WORLD)
    hub.on_message(1, {"t": "bye"})
    (failure,) = hub.on_gone(1)
    assert failure.header["what"] == "rank 1 has ended its program while others still run"


def test_a_relay_without_its_parent_ends_all_below_it():
    relay = Relay(1, WORLD)
    (failure,) = relay.on_parent_lost({"kind": "RemoteError", "what": "rank 0 died"})
    assert failure.to is None and failure.header["t"] == "failure"
    assert [(m.to, m.header["t"]) for m in relay.on_message(33, {"t": "fail"})] == [((33,), "noted")]
    assert relay.on_shutdown() == []


def test_few_histories_are_asked_of_many_ranks():
    hub = Hub(WORLD)
    asked = []
    for rank in (0, *range(2, 33)):
        asked += start(hub, rank, 3)
    asked += hub.on_message(1, begun(3, [(1, 1), (33, 39)], digest=6))
    assert [(message.to, message.header["t"]) for message in asked] == [((0,), "history"), ((1,), "history")]
    show = {"t": "history", "query": 1}
    assert hub.on_message(0, show, b'[[1, "embed"]]') == []
    (failure,) = hub.on_message(1, show, b'[[2, "flush"]]')
    assert failure.header["what"] == "the ranks' programs differ at step 3"
    assert failure.header["why"] == "ranks 0, 2-32: embed\nranks 1, 33-39: flush"
