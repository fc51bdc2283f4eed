"""Ranks below others: failures, deaths, goodbyes and late ranks are named as in a star. Each has two children.

0 -- 1 -- 3 -- 7
  |    |    |- 8
  |    |- 4
  |- 2 -- 5
       |- 6
"""

import contextlib
import socket
import threading

import pytest
from tests.support.side import LONG_S, connect, each, open_hubs, open_ranks, record, step

from farspan.control.channel import SideChannel
from farspan.control.hub.server import HubServer
from farspan.control.tree import numbers
from farspan.control.tree.relay import Relay
from farspan.control.wire import FrameReader, encode
from farspan.errors import DeadlineError, DivergenceError, FarspanError, LaunchError, RemoteError

NUM_RANKS = 9


@pytest.fixture
def channels(monkeypatch):
    monkeypatch.setattr(numbers, "FAN_OUT", 2)
    monkeypatch.setattr("farspan.control.hub.server.LOOK_S", 0.05)
    with open_ranks() as make:
        yield make(NUM_RANKS)


def test_steps_gathers_and_questions_of_many_ranks(channels):
    for channel in channels:
        channel.serve(lambda body, rank=channel.rank: {"from": rank})

    def act(channel):
        for number in range(20):
            step(number)(channel)
            channel.contribute(f"k{number}", bytes([channel.rank]) * number)
        for number in range(20):
            assert channel.gathered(f"k{number}", LONG_S) == [bytes([rank]) * number for rank in range(NUM_RANKS)]
        other = (channel.rank + 4) % NUM_RANKS
        assert channel.request(other, {}, LONG_S) == {"from": other}
        channel.finish(LONG_S)

    assert each(channels, act) == [None] * NUM_RANKS


def test_only_the_receiver_gets_the_parts(channels):
    heard = []
    for channel in channels[:8]:
        listener = channel._link._on_frame
        channel._link._on_frame = lambda frame, take=listener: (heard.append(frame.header["t"]), take(frame))
    for channel in channels:
        channel.contribute("timeline", bytes([channel.rank]), receiver=8)
    assert channels[8].gathered("timeline", LONG_S) == [bytes([rank]) for rank in range(NUM_RANKS)]
    assert each(channels, step(0)) == [None] * NUM_RANKS
    assert "agreed" in heard and "gathered" not in heard
    with pytest.raises(ValueError, match="not contributed here"):
        channels[0].gathered("timeline", 0)


@pytest.mark.parametrize("rank", [3, 8, 0])
def test_a_failure_reaches_everyone(channels, rank):
    def act(channel):
        if channel.rank == rank:
            channel.fail(ValueError("shapes do not match"))
        else:
            step(0)(channel)

    errors = each(channels, act)
    assert errors.pop(rank) is None
    for error in errors:
        assert isinstance(error, RemoteError)
        assert (error.what, error.rank) == (f"rank {rank} failed: ValueError: shapes do not match", rank)


def test_the_death_of_a_rank_that_passes_on_is_named_above_and_below_it(channels):
    server = channels[1]._server
    server._node.on_parent_lost = lambda failure: []  # a dead process says nothing
    waiting = threading.Thread(target=lambda: errors.extend(each([*channels[:1], *channels[2:]], step(0))))
    errors = []
    waiting.start()
    for sock in [server._uplink.sock, *[connection.sock for connection in list(server._by_rank.values())]]:
        sock.shutdown(socket.SHUT_RDWR)
    waiting.join(LONG_S)
    assert [(type(error), error.what.partition(" (")[0]) for error in errors] == [(RemoteError, "rank 1 died")] * 8


def test_programs_that_differ_are_found_though_a_rank_waits_for_ever(channels):
    record(channels, [["embed", f"call {channel.rank == 7}"] for channel in channels])
    begun = [channel for channel in channels if channel.rank not in (4, 8)]  # which never come
    for error in each(begun, step(5, lambda rank: int(rank == 7))):
        assert isinstance(error, DivergenceError)
        others, own = error.why.splitlines()  # as many others as have been heard of
        assert others.endswith(": call False") and own == "rank 7: call True"


def test_late_ranks_are_named_wherever_they_are(channels):
    for channel in channels:
        if channel.rank not in (4, 7):
            channel.start(3, 1)
    threading.Event().wait(0.5)  # until what has come has been passed on
    with pytest.raises(DeadlineError) as caught:
        channels[6].wait_agreed(3, 0.0)
    assert caught.value.what == "rank 6 waited 0 s for ranks 4, 7 to begin step 3"
    assert "rank 4: has done nothing yet" in caught.value.why and "rank 7 is at" in caught.value.why


def test_a_rank_that_passes_on_and_is_stopped_is_named_and_not_those_below_it(channels, monkeypatch):
    monkeypatch.setattr("farspan.control.late._STACK_S", 0.3)
    monkeypatch.setattr(channels[3]._server._node, "on_parent", lambda header, payload: [])
    assert channels[6].late.place_of(7) == "rank 3 does not say where it is: its process is stopped"
    chain, why = channels[6].late.behind(8)
    assert chain == "" and why.startswith("rank 3 does not go on")
    _, why = channels[7].late.behind(2)
    assert "it, or ranks 1, 3, which pass its answers on, is stopped" in why


def test_ranks_end_in_any_order(channels):
    assert each(channels, step(0)) == [None] * NUM_RANKS
    closing = [threading.Thread(target=channel.close, args=(LONG_S,)) for channel in channels]
    for thread in closing[:8]:
        thread.start()
    threading.Event().wait(0.3)
    assert all(thread.is_alive() for thread in (closing[0], closing[1], closing[3]))  # 8 is below them
    closing[8].start()
    for thread in closing:
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert [channel.failure for channel in channels] == [None] * NUM_RANKS


def test_the_goodbye_of_a_rank_that_passes_on_is_not_lost_where_it_is_busy(channels):
    for rank in (7, 8):
        channels[rank].close(LONG_S)
    is_busy, may_go_on = threading.Event(), threading.Event()
    channels[3]._server._node.on_tick = lambda: (is_busy.set(), may_go_on.wait(LONG_S), [])[-1]
    assert is_busy.wait(LONG_S)
    closing = threading.Thread(target=channels[3].close, args=(LONG_S,))
    closing.start()
    threading.Event().wait(0.2)  # until it is to stop
    may_go_on.set()
    closing.join(LONG_S)
    status = channels[0]._ask({"t": "status", "rank": 3}, LONG_S)
    assert status["notes"] == ["rank 3: the last it did was: ended its program"]


def test_who_outlives_a_rank_that_passes_on_is_told(channels):
    channels[3].close(linger_s=0.1)
    with pytest.raises(RemoteError, match="rank 3 has ended its program while others still run"):
        step(0)(channels[8])
    with pytest.raises(FarspanError, match="rank 3 has ended its program"):
        step(0)(channels[5])


def test_a_rank_connects_where_it_belongs(monkeypatch):
    monkeypatch.setattr(numbers, "FAN_OUT", 2)
    servers = open_hubs(NUM_RANKS, "secret")
    with pytest.raises(LaunchError, match="rank 7 has no place below rank 0"):
        SideChannel.connect(7, NUM_RANKS, servers[0].address, "secret", LONG_S)
    with pytest.raises(LaunchError, match="does not know its secret"):
        SideChannel.connect(7, NUM_RANKS, servers[3].address, "guess", LONG_S)
    with pytest.raises(LaunchError, match="rank 2 refused rank 5"):
        SideChannel.host(NUM_RANKS, "guess", "127.0.0.1", rank=5, parent=servers[2].address, deadline_s=LONG_S)
    channels = [connect(servers, rank, NUM_RANKS, "secret", LONG_S) for rank in range(NUM_RANKS)]
    for channel in reversed(channels):
        channel.close(LONG_S)


class Above:
    """The hub above a relay of rank 1, as far as the relay sees it: a socket."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            below = socket.create_connection(listener.getsockname())
            self.sock, _ = listener.accept()
        self.sock.settimeout(LONG_S)
        self.relay = HubServer(Relay(1, NUM_RANKS), "secret", "127.0.0.1", (below, FrameReader()))
        self._reader = FrameReader()

    def hear(self) -> list[str]:
        """What the relay has said, up to the end."""
        heard: list[str] = []
        with contextlib.suppress(EOFError):
            while True:
                heard += [frame.header["t"] for frame in self._reader.read(self.sock)]
        return heard


def test_a_relay_that_ends_reads_what_comes_from_above_until_that_is_closed(monkeypatch):
    """Else its end would be a broken connection above, and what it has said last could be lost."""
    monkeypatch.setattr(numbers, "FAN_OUT", 2)
    above = Above()
    stopping = threading.Thread(target=above.relay.stop)
    stopping.start()
    above.hear()
    above.sock.sendall(b"".join(encode({"t": "agreed", "step": 0})))
    stopping.join(0.05)
    assert stopping.is_alive()
    above.sock.close()
    stopping.join(LONG_S)
    assert not stopping.is_alive()


def test_a_relay_that_ends_passes_on_the_goodbye_of_its_own_rank(monkeypatch):
    monkeypatch.setattr(numbers, "FAN_OUT", 2)
    above = Above()
    own = SideChannel.connect(1, NUM_RANKS, above.relay.address, "secret", LONG_S)
    stopping = threading.Thread(target=above.relay.stop)
    stopping.start()
    threading.Event().wait(0.05)  # until it is to stop
    own._link.send({"t": "bye"})
    assert "bye" in above.hear()
    above.sock.close()
    stopping.join(LONG_S)
    own.close(linger_s=0.0)


def test_a_relay_that_ends_sends_all_that_it_has_queued(monkeypatch):
    monkeypatch.setattr(numbers, "FAN_OUT", 2)
    above = Above()
    frames = [encode({"t": f"{number}"}, bytes(1 << 20)) for number in range(16)]  # more than a socket takes
    assert above.relay._uplink is not None
    above.relay._send(above.relay._uplink, [buffer for frame in frames for buffer in frame])
    stopping = threading.Thread(target=above.relay.stop)
    stopping.start()
    threading.Event().wait(0.05)  # until it is to stop
    assert above.hear()[:16] == [f"{number}" for number in range(16)]
    above.sock.close()
    stopping.join(LONG_S)
