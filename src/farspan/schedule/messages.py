"""The messages of a schedule: who sends what to whom, and when the receiver makes room for it.

There is one channel for each source, destination and direction, first in first out. The receiver posts its receives in
the order in which the other side sends, each no later than its first use; where a later message is used first, the ones
before it are posted along with it. So both ends agree on every channel without a word, and no order can deadlock:

    rank 0    F0 F1 F2 ...         sends      0 1 2
    rank 1    F1 F0 F2 ...         posts    0+1 . 2
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from farspan.schedule.schedule import Schedule
from farspan.schedule.task import Kind

__all__ = ["Channel", "Message", "as_sent", "channels_of", "places_of"]


class Channel(NamedTuple):
    """One direction of a pair of ranks."""

    source: int
    destination: int
    is_gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message from one task to one other rank.

    Attributes:
        task: The task that makes it.
        channel: Where it travels.
        size_bytes: How large it is.
        users: The tasks of the destination that need it.
        posted_at: Place in the destination's order at which its receive is posted at the latest.
    """

    task: int
    channel: Channel
    size_bytes: float
    users: tuple[int, ...]
    posted_at: int


def places_of(schedule: Schedule) -> dict[int, int]:
    """Returns for each task its place in its order."""
    return {index: place for order in schedule.orders for place, index in enumerate(order)}


def as_sent(users: Mapping[int, Iterable[int]], place: Mapping[int, int], lookahead: int) -> list[tuple[int, int]]:
    """Returns the tasks that send through one channel, in that order; each with the place where its receive is posted.

    Args:
        users: For each of them the tasks that need what it sends.
        place: For each task its place in its order.
        lookahead: Receives are posted so many tasks before the one that needs them.
    """
    found: list[tuple[int, int]] = []
    needed_at: float = math.inf
    for task in sorted(users, key=place.__getitem__, reverse=True):
        needed_at = min(needed_at, *(place[user] for user in users[task]))
        found.append((task, max(0, int(needed_at) - lookahead)))
    return found[::-1]


def channels_of(schedule: Schedule, *, lookahead: int = 0) -> dict[Channel, list[Message]]:
    """Returns for each channel its messages, in the order in which they are sent and received.

    Args:
        schedule: The tasks and their orders.
        lookahead: Receives are posted so many tasks before the one that needs them.
    """
    place, tasks = places_of(schedule), schedule.tasks
    users: dict[Channel, dict[int, list[int]]] = {}
    for index, task in enumerate(tasks):
        for need in task.needs:
            source = tasks[need]
            if source.rank != task.rank:
                channel = Channel(source.rank, task.rank, source.kind is not Kind.FORWARD)
                users.setdefault(channel, {}).setdefault(need, []).append(index)
    return {
        channel: [
            Message(
                task=task,
                channel=channel,
                size_bytes=tasks[task].bytes_to(channel.destination),
                users=tuple(users[channel][task]),
                posted_at=posted_at,
            )
            for task, posted_at in as_sent(users[channel], place, lookahead)
        ]
        for channel in sorted(users)
    }
