"""The messages of a schedule: who sends what to whom, and when the receiver makes room for it.

There is one channel for each source, destination and direction, first in first out. The receiver posts its receives in
the order in which the other side sends, each no later than its first use; where a later message is used first, the ones
before it are posted along with it. So both ends agree on every channel without a word, and no order can deadlock:

    rank 0    F0 F1 F2 ...         sends      0 1 2
    rank 1    F1 F0 F2 ...         posts    0+1 . 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from farspan.schedule.schedule import Schedule
from farspan.schedule.task import Kind

__all__ = ["Channel", "Message", "channels_of"]


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


def channels_of(schedule: Schedule, *, lookahead: int = 0) -> dict[Channel, list[Message]]:
    """Returns for each channel its messages, in the order in which they are sent and received.

    Args:
        schedule: The tasks and their orders.
        lookahead: Receives are posted so many tasks before the one that needs them.
    """
    place = {index: place for order in schedule.orders for place, index in enumerate(order)}
    users: dict[tuple[int, int], list[int]] = {}
    for index, task in enumerate(schedule.tasks):
        for need in task.needs:
            if schedule.tasks[need].rank != task.rank:
                users.setdefault((need, task.rank), []).append(index)
    senders: dict[Channel, list[int]] = {}
    for index, destination in users:
        task = schedule.tasks[index]
        senders.setdefault(Channel(task.rank, destination, task.kind is not Kind.FORWARD), []).append(index)
    channels: dict[Channel, list[Message]] = {}
    for channel, indices in sorted(senders.items()):
        messages: list[Message] = []
        posted_at = len(schedule.orders[channel.destination])
        for index in sorted(indices, key=place.__getitem__, reverse=True):
            needed_by = users[index, channel.destination]
            posted_at = min(posted_at, *(max(0, place[user] - lookahead) for user in needed_by))
            messages.append(
                Message(
                    task=index,
                    channel=channel,
                    size_bytes=schedule.tasks[index].bytes_to(channel.destination),
                    users=tuple(needed_by),
                    posted_at=posted_at,
                )
            )
        channels[channel] = messages[::-1]
    return channels
