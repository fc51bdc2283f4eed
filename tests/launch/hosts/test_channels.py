"""Channels: several conversations over one connection of the launcher with an agent."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from farspan.launch.hosts import connection as connection_module
from farspan.launch.hosts.connection import Channel, Connection, LostError

Ends = tuple[Connection, Connection, list[Channel]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Both ends of a connection, by pipes, and the channels that the second one has opened."""
    read_first, write_second = os.pipe()
    read_second, write_first = os.pipe()
    first = Connection(read_first, write_first, silence_s=60.0, hang_up=lambda: os.close(write_first))
    second = Connection(read_second, write_second, silence_s=60.0, hang_up=lambda: os.close(write_second))
    opened: list[Channel] = []
    second.on_channel = opened.append
    yield first, second, opened
    first.close()
    second.close()


def test_each_channel_has_its_own_messages_in_order(ends: Ends) -> None:
    first, second, opened = ends
    actor, learner = first.channel("actor"), first.channel("learner")
    for number in range(3):
        actor.send({"do": "a", "number": number})
        learner.send({"do": "b", "number": number})
    first.send({"do": "end"})
    assert second.receive() == {"do": "end"}
    assert [channel.name for channel in opened] == ["actor", "learner"]
    for channel, kind in zip(opened, "ab", strict=True):
        assert [channel.receive() for _ in range(3)] == [{"do": kind, "number": number} for number in range(3)]
    opened[0].send({"is": "answer"})
    second.send({"is": "end"})
    assert first.receive() == {"is": "end"} and actor.receive() == {"is": "answer"}


def test_a_channel_that_is_closed_ends_alone(ends: Ends) -> None:
    first, second, opened = ends
    actor, learner = first.channel("actor"), first.channel("learner")
    for channel in (actor, learner):
        channel.send({"do": "a"})
    actor.close()
    first.send({"do": "end"})
    second.receive()
    assert opened[0].receive() == opened[1].receive() == {"do": "a"}
    with pytest.raises(LostError, match="the other end has closed the channel"):
        opened[0].receive()
    with pytest.raises(LostError, match="the channel is closed"):
        actor.receive()
    opened[1].send({"is": "there"})
    opened[0].send({"is": "late"})  # goes nowhere
    actor.send({"do": "late"})  # and opens no other one
    first.send({"do": "end"})
    second.receive()
    assert len(opened) == 2
    second.send({"is": "end"})
    assert first.receive() == {"is": "end"} and learner.receive() == {"is": "there"}


def test_all_channels_are_lost_with_the_connection(ends: Ends) -> None:
    first, second, opened = ends
    here = first.channel("actor")
    here.send({"do": "a"})
    first.send({"do": "end"})
    second.receive()
    opened[0].receive()
    second.close()  # by who does not receive any more
    with pytest.raises(LostError):
        opened[0].receive()
    with pytest.raises(LostError):
        first.receive()
    for channel in (here, first.channel("later")):
        with pytest.raises(LostError):
            channel.receive()


def test_who_reads_waits_for_a_channel_that_is_full_until_it_is_read_or_closed(ends: Ends, monkeypatch) -> None:
    monkeypatch.setattr(connection_module, "_MOST_WAITING", 2)
    first, second, opened = ends
    has_opened = threading.Event()
    second.on_channel = lambda channel: (opened.append(channel), has_opened.set())[0]
    actor = first.channel("actor")
    for number in range(5):
        actor.send({"do": "a", "number": number})
    first.send({"do": "end"})
    found: list[object] = []
    reading = threading.Thread(target=lambda: found.append(second.receive()), daemon=True)
    reading.start()
    assert has_opened.wait(60.0)
    assert [opened[0].receive()["number"] for _ in range(2)] == [0, 1]
    opened[0].close()
    reading.join(60.0)
    assert found == [{"do": "end"}]
