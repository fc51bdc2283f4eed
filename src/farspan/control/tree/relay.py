"""Relays messages between a rank's children and its parent, as a pure state machine.

    child   start, contribute       held back until all below have said the same, then one message   --> parent
    child   any with "to"           to that rank, where it is below, else                            --> parent
    child   anything else           with "from", who has said it                                     --> parent
            gone, silent            of a child's connection                                          --> parent
    parent  any with "to"           to these ranks            any other, to all below                --> children

What is held back is passed on as far as it has come where programs differ, where one of the ranks ends, and after about
a second: so the hub knows who is late, and finds out that programs differ although some rank waits for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farspan.control.text import describe_left_behind, describe_lost_link
from farspan.control.tree.blocks import MAX_PARTS_BYTES, Parts, ranges_of
from farspan.control.tree.message import Message
from farspan.control.tree.numbers import client_towards, ranks_below
from farspan.control.tree.rounds import Begun, Round, Rounds
from farspan.control.tree.speakers import Speakers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from farspan.control.wire import Buffer, Header

__all__ = ["Relay"]


class Relay:
    """The node of a rank other than 0 that has children (`Node`).

    Attributes:
        failed: A failure has been passed on to all below.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.ranks = ranks_below(rank, world_size)
        self.joined: set[int] = set()
        self.ended: set[int] = set()
        self.died: set[int] = set()
        self.heard: set[int] = set()
        self.failed = False
        self._has_parent = True
        self._speakers = Speakers(rank, world_size)
        self._rounds = Rounds(len(self.ranks))
        self._gathers: dict[str, Parts] = {}

    def on_joined(self, rank: int) -> list[Message]:
        self.joined.add(rank)
        return self._up({"t": "joined", "from": rank})

    def on_message(self, rank: int, header: Header, payload: Buffer = b"") -> list[Message]:
        kind = header.get("t")
        if kind == "start":
            return self._on_start(rank, header)
        if kind == "contribute":
            return self._on_contribute(rank, header, payload)
        speaker = self._speakers.one(rank, header)
        if kind == "fail" and not self._has_parent:
            return [Message((speaker,), {"t": "noted"})]
        if kind == "bye":
            self.ended.add(speaker)
        elif kind == "heard":
            self.heard.add(speaker)
        elif kind == "gone":
            self.died.update(self._speakers.many(rank, header))
        header = {**header, "from": speaker}
        to = header.get("to")
        if to is not None and client_towards(to, self.rank) is not None:
            del header["to"]
            return [Message((to,), header)] if to < self.world_size else []
        released = self._release() if kind in ("bye", "finish", "late", "status") else []
        return [*released, *self._up(header, payload)]

    def on_gone(self, rank: int) -> list[Message]:
        lost = self._speakers.below(rank) - self.ended - self.died
        self.died |= lost
        return self._up({"t": "gone", "from": rank, "ranks": ranges_of(sorted(lost))}) if lost else []

    def on_silent(self, rank: int) -> list[Message]:
        if self.failed or rank in self.ended:
            return []
        failure = Message((rank,), {"t": "failure", **describe_lost_link(rank)})
        return [*self._up({"t": "silent", "from": rank}), failure]

    def on_tick(self) -> list[Message]:
        return self._release(only_old=True)

    def on_parent(self, header: Header, payload: Buffer) -> list[Message]:
        if header.get("t") == "failure":
            self._fail()
        to = header.pop("to", None)
        return [Message(None if to is None else tuple(to), header, payload)]

    def on_parent_lost(self, failure: Header) -> list[Message]:
        self._has_parent = False
        return self._publish(failure)

    def on_shutdown(self) -> list[Message]:
        return self._publish(describe_left_behind(self.rank))

    def _publish(self, failure: Header) -> list[Message]:
        if self.failed:
            return []
        self._fail()
        return [Message(None, {"t": "failure", **failure})]

    def _fail(self) -> None:
        self.failed = True
        self._rounds.clear()
        self._gathers.clear()

    def _up(self, header: Header, payload: Buffer = b"") -> list[Message]:
        return [Message((), header, payload, is_for_parent=True)] if self._has_parent else []

    # -- what is held back --------------------------------------------------------------------------------------------

    def _on_start(self, rank: int, header: Header) -> list[Message]:
        if self.failed:
            return []
        ranks, begun = self._speakers.many(rank, header), Begun.of(header)
        found = self._rounds.add(ranks, begun)
        if (whole := self._rounds.close_first()) is not None:
            return self._starts(whole)
        # Each rank's steps in the order in which it has begun them: none before the one before it.
        return [] if found.is_agreed else self._release_rounds([*self._rounds.before(found), found])

    def _on_contribute(self, rank: int, header: Header, payload: Buffer) -> list[Message]:
        if self.failed:
            return []
        key = header["key"]
        parts = self._gathers.setdefault(key, Parts())
        self._speakers.add_parts(parts, rank, header, payload)
        if parts.size_bytes > MAX_PARTS_BYTES:
            return self._up({"t": "large", "key": key, "bytes": parts.size_bytes, "from": self.rank})
        if len(parts.ranks) < len(self.ranks):
            return []
        del self._gathers[key]
        return self._contributed(key, parts)

    def _release(self, *, only_old: bool = False) -> list[Message]:
        """Pass on what has come; with `only_old`, of what was there when this was called last."""
        messages = self._release_rounds([each for each in self._rounds if each.is_old or not only_old])
        for key, parts in self._gathers.items():
            if parts.is_old or not only_old:
                messages += self._contributed(key, parts)
        for each in (*self._rounds, *self._gathers.values()):
            each.is_old = True
        return messages

    def _release_rounds(self, rounds: Iterable[Round]) -> list[Message]:
        return [message for each in rounds for message in self._starts(each)]

    def _starts(self, found: Round) -> list[Message]:
        return [
            message
            for ranks, begun in found.take()
            for message in self._up({"t": "start", "ranks": ranges_of(ranks), **begun._asdict()})
        ]

    def _contributed(self, key: str, parts: Parts) -> list[Message]:
        blocks = parts.take_blocks()
        header: Header = {"t": "contribute", "key": key, "is_merged": True}
        if parts.receiver is not None:
            header["for"] = parts.receiver
        return self._up(header, blocks) if blocks else []
