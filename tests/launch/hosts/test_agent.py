"""How the agent of another host ends: with its roles, their directory of services, and the saves in memory."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from farspan.launch.hosts.agent import Agent
from farspan.launch.hosts.connection import LostError


class Link:
    """A connection, or the channel of a role, that is lost when `is_over` is set."""

    name = "a-role"

    def __init__(self, ended: list[str], what: str, is_over: threading.Event) -> None:
        self.ended, self.what, self.is_over = ended, what, is_over

    def receive(self) -> Any:
        if self.what == "role":
            assert self.is_over.wait(30)
        raise LostError("the launcher is gone")

    def close(self) -> None:
        self.ended.append(self.what)
        self.is_over.set()


def test_a_host_is_left_when_all_that_it_has_opened_is_closed() -> None:
    ended: list[str] = []
    is_over = threading.Event()
    relay: Any = SimpleNamespace(close=lambda: ended.append("relay"))
    connection: Any = Link(ended, "connection", is_over)
    channel: Any = Link(ended, "role", is_over)
    agent: Any = Agent(connection, relay=relay)
    agent._memory = SimpleNamespace(close=lambda: ended.append("memory"))
    agent._open_role(channel)
    assert agent.run() == "the launcher is gone"
    assert ended[0] == "connection" and ended[-1] == "relay"
    assert sorted(ended) == ["connection", "memory", "relay", "role"]
