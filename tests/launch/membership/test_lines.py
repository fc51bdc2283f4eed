"""What the two ends of the connection about who belongs to the run make of what is sent; the lines are stand-ins."""

from __future__ import annotations

from typing import Any

import pytest

from farspan.launch.membership import Door, client, door
from farspan.launch.membership.client import Membership


class Lines:
    """A connection by which some messages come before it ends."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.left = list(messages)
        self.sent: list[dict[str, Any]] = []
        self.files: list[int] = []

    def send(self, message: dict[str, Any], files: Any = ()) -> None:
        self.sent.append(message)

    def receive(self) -> dict[str, Any]:
        if not self.left:
            raise EOFError
        return self.left.pop(0)


def test_a_rank_hears_of_each_loss_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "connect_to", lambda folder: Lines())
    member = Membership("", 0, world=[0, 1, 2], group=0, num_groups=3)
    heard: list[Any] = []
    member.on_lost = heard.append
    member._take({"is": "lost", "ranks": [2], "why": "rank 2 was killed"})
    assert heard == [[2]] and member.reasons == ["rank 2 was killed"]
    assert member.is_lost(2) and member.is_broken() and not member.is_lost(1)


def test_the_launcher_knows_to_whom_it_can_say_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "Entrance", lambda *args: None)
    heard: list[Any] = []
    made, lines = Door("", lambda rank, message: heard.append((rank, message))), Lines({"rank": 3})
    made._serve(lines)  # type: ignore[arg-type]
    assert heard == [(3, {"rank": 3})]
    assert made.send(3, {"is": "over"}) is True and lines.sent == [{"is": "over"}]
    assert made.send(4, {"is": "over"}) is False
