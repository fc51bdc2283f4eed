"""Decides for the hub, as a pure state machine: a message in, messages out; no sockets, no clocks, no threads.

    to the hub                                       from the hub
    start       step, digest, data                   agreed      step              (all began it with one digest)
    history     query + entries                      history     query, step       (programs differ: show yours)
    contribute  key, for + blob                      gathered    key + blocks      (to one rank, or to all)
                                                     void        key, what         (can never be complete)
    (any with "to": a header for that rank)          (the same, "to" replaced by "from")
    fail        what, why, hint, traceback           failure     the error; noted, to its origin
    status      id, step | key | rank | nothing      status      id, missing, here, notes
    late        to_do, for_s, what a status has      say         text              (to rank 0)
    finish      step, digest (still answers)         finished                      (all ranks have, with one digest)
    bye                                              ended       rank

Past 33 ranks relays stand between (`side/tree`). They say who has said what ("from"), merge what several ranks say
("ranks", "is_merged"), and say of the ranks below them: joined, gone, silent, large (parts of a gather).

The first failure wins: after it the hub answers `status`, passes on questions and their answers, and counts goodbyes.
Unknown messages are ignored, so that the protocol can grow.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from farspan.control.hub.dispute import Dispute
from farspan.control.hub.divergence import ProgramEnd
from farspan.control.text import (
    EACH_OTHER,
    clip_head,
    describe_death,
    describe_failure,
    describe_large_gather,
    describe_left_behind,
    describe_lost_link,
    name_ranks,
)
from farspan.control.tree.blocks import MAX_PARTS_BYTES, Parts
from farspan.control.tree.message import Message
from farspan.control.tree.rounds import Begun, Rounds
from farspan.control.tree.speakers import Speakers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from farspan.control.wire import Buffer, Header

    _Event = tuple[Sequence[int], str, object]

__all__ = ["Hub"]

_MAX_NOTES = 4
_MAX_EVENTS = 5_000
_MAX_SAID = 32
"""Lines about ranks that wait for the same."""


class _End(NamedTuple):
    """The end of a rank's program: the step that it would begin, and the digest of what it did since the last one."""

    step: int
    digest: int


class Hub:
    """Agreement, gathers, relayed messages, failures and goodbyes of `world_size` ranks (`Node`)."""

    def __init__(self, world_size: int) -> None:
        self.rank = 0
        self.world_size = world_size
        self.ranks = range(world_size)
        self.joined: set[int] = set()
        self.finished: set[int] = set()
        """Ranks whose program is over: they begin no step any more, but may still answer."""
        self.ended: set[int] = set()
        """Ranks that have said bye; also in `finished`."""
        self.died: set[int] = set()
        """Ranks whose connection closed without a goodbye."""
        self.heard: set[int] = set()
        """Ranks that know of a failure."""
        self.failed = False
        self._speakers = Speakers(0, world_size)
        self._rounds = Rounds(world_size)
        self._ends: dict[int, _End] = {}
        """The ranks whose program is over."""
        self._program_ends: dict[int, ProgramEnd] = {}
        """Where those of them were that have said so."""
        self._have_all_finished = False
        self._gathers: dict[str, Parts] = {}
        self._dispute: Dispute | None = None
        self._num_queries = 0
        self._num_said: Counter[str] = Counter()
        self._late: dict[int, tuple[Sequence[int], str]] = {}
        """For whom a rank has waited long, and what it had done last."""
        self._agreed_step = -1
        self._events: list[_Event] = []
        """Actions of ranks, in order: the words, and what stands in them."""

    def on_joined(self, rank: int) -> list[Message]:
        self.joined.add(rank)
        return []

    def on_message(self, rank: int, header: Header, payload: Buffer = b"") -> list[Message]:
        kind = header.get("t")
        if kind == "start" and not self.failed:
            return self._on_start(self._speakers.many(rank, header), Begun.of(header))
        if kind == "contribute" and not self.failed:
            return self._on_contribute(rank, header, payload)
        rank = self._speakers.one(rank, header)
        if kind == "joined":
            return self.on_joined(rank)
        if kind == "gone":
            return self._on_lost(rank, set(self._speakers.many(rank, header)))
        if kind == "heard":
            self.heard.add(rank)
            return []
        if kind == "bye":
            self.ended.add(rank)
            ended = [] if self._have_all_finished else [Message(None, {"t": "ended", "rank": rank})]
            return self._on_finish(rank, header, ended)
        if kind == "status":
            return [Message((rank,), {"t": "status", "id": header["id"], **self._status(header)})]
        if kind in ("request", "reply"):  # a rank that has failed answers for a while
            return self._relay(rank, header)
        if self.failed:
            # Whoever fails second must not wait for an answer either.
            return [Message((rank,), {"t": "noted"})] if kind == "fail" else []
        if kind == "silent":
            return self.on_silent(rank)
        if kind == "large":
            return self._publish(describe_large_gather(header["key"], header["bytes"]))
        if kind == "late":
            return self._on_late(rank, header)
        if "to" in header:
            return self._relay(rank, header)
        if kind == "history":
            return self._on_history(rank, header, payload)
        if kind == "fail":
            return [*self._publish(describe_failure(rank, header)), Message((rank,), {"t": "noted"})]
        if kind == "finish":
            return self._on_finish(rank, header, [])
        return []

    def on_gone(self, rank: int) -> list[Message]:
        return self._on_lost(rank, set(self._speakers.below(rank)))

    def _on_lost(self, rank: int, unreachable: set[int]) -> list[Message]:
        """Handles the loss of the connection of `rank`, by way of which the hub spoke to `unreachable`, that rank
        included."""
        lost = unreachable - self.ended - self.died
        self.died |= lost
        if self.failed or not lost:
            return []
        return self._publish(describe_death(rank) if rank in lost else describe_left_behind(rank))

    def on_silent(self, rank: int) -> list[Message]:
        return [] if self.failed or rank in self.ended else self._publish(describe_lost_link(rank))

    def on_tick(self) -> list[Message]:
        return []

    def on_parent(self, header: Header, payload: Buffer) -> list[Message]:
        raise AssertionError("the hub has no parent")

    def on_parent_lost(self, failure: Header) -> list[Message]:
        raise AssertionError("the hub has no parent")

    def on_shutdown(self) -> list[Message]:
        return [] if self.failed else self._publish(describe_left_behind(0))

    def _publish(self, failure: Header) -> list[Message]:
        """Everybody hears of it, also who has failed, and does not look at it."""
        self.failed = True
        self._dispute = None
        self._gathers.clear()
        return [Message(None, {"t": "failure", "traceback": "", **failure})]

    # -- agreement ----------------------------------------------------------------------------------------------------

    def _on_start(self, ranks: Sequence[int], begun: Begun) -> list[Message]:
        self._note(ranks, "began step {}", begun.step)
        found = self._rounds.add(ranks, begun)
        if self._dispute is not None:
            return []
        if not found.is_agreed:
            return self._open_dispute(_groups(found.entries), [])
        if self.finished and (ended := sorted(self.finished - found.ranks)):
            return self._open_dispute(_groups(found.entries), ended)
        if self._rounds.close_first() is None:
            return []
        self._agreed_step = begun.step
        return [Message(None, {"t": "agreed", "step": begun.step})]

    def _open_dispute(
        self, groups: Sequence[tuple[Sequence[int], tuple[int, int]]], ended: Sequence[int]
    ) -> list[Message]:
        self._num_queries += 1
        self._dispute = dispute = Dispute(groups, ended, self.ended | self.died, self._program_ends)
        if not dispute.missing:
            return self._publish(dispute.failure())
        return [
            Message((rank,), {"t": "history", "query": self._num_queries, "step": dispute.step_of(rank)})
            for rank in sorted(dispute.missing)
        ]

    def _on_history(self, rank: int, header: Header, payload: Buffer) -> list[Message]:
        dispute = self._dispute
        if dispute is None or header["query"] != self._num_queries or rank not in dispute.missing:
            return []
        dispute.show(rank, header, payload)
        return [] if dispute.missing else self._publish(dispute.failure())

    # -- gathers and relays -------------------------------------------------------------------------------------------

    def _on_contribute(self, client: int, header: Header, payload: Buffer) -> list[Message]:
        key = header["key"]
        parts = self._gathers.setdefault(key, Parts())
        ranks = self._speakers.add_parts(parts, client, header, payload)
        self._note(ranks, "gave its part of {!r}", key)
        if parts.size_bytes > MAX_PARTS_BYTES:
            return self._publish(describe_large_gather(key, parts.size_bytes))
        if len(parts.ranks) < self.world_size:
            missing = self.finished - parts.ranks
            return [self._void(key, missing, tuple(ranks))] if missing else []
        del self._gathers[key]
        to = None if parts.receiver is None else (parts.receiver,)
        return [Message(to, {"t": "gathered", "key": key}, parts.take_blocks())]

    def _void(self, key: str, missing: set[int], to: tuple[int, ...]) -> Message:
        verb = "has ended its program" if len(missing) == 1 else "have ended their programs"
        what = f"{name_ranks(missing)} {verb} without giving a part of {clip_head(key, 80)!r}"
        return Message(to, {"t": "void", "key": key, "what": what})

    def _relay(self, rank: int, header: Header) -> list[Message]:
        """Returns the message in which one rank speaks to another: a header, no payload."""
        to = header["to"]
        if header.get("t") == "request":
            self._note((rank,), "asked rank {}", to)
        if not 0 <= to < self.world_size or to in self.ended or to in self.died:
            return []
        passed_on = {name: value for name, value in header.items() if name != "to"}
        return [Message((to,), {**passed_on, "from": rank})]

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _on_finish(self, rank: int, header: Header, messages: list[Message]) -> list[Message]:
        """Handles the end of a rank's program: it begins no step and gives no part of a gather any more."""
        first_time = rank not in self.finished
        self.finished.add(rank)
        if "digest" in header:
            self._ends[rank] = _End(header["step"], header["digest"])
            self._program_ends[rank] = ProgramEnd.of(header.get("end"))
        self._note((rank,), "ended its program")
        if self.failed:
            return []
        if first_time:
            for key, parts in self._gathers.items():
                if rank not in parts.ranks:
                    messages.append(self._void(key, {rank}, tuple(sorted(parts.ranks - self.ended))))
            if len(self.finished) == self.world_size and not self._rounds and self._dispute is None:
                if len(set(self._ends.values())) > 1:
                    return [*messages, *self._open_dispute([((r,), end) for r, end in self._ends.items()], [])]
                self._have_all_finished = True
                messages.append(Message(None, {"t": "finished"}))
        dispute = self._dispute
        if dispute is not None:
            # Who has said bye cannot show its history any more.
            dispute.missing -= self.ended
            return messages if dispute.missing else [*messages, *self._publish(dispute.failure())]
        waiting = self._rounds.next_of(rank)
        return [*messages, *self._open_dispute(_groups(waiting.entries), [rank])] if waiting else messages

    # -- who is late --------------------------------------------------------------------------------------------------

    def _note(self, ranks: Sequence[int], words: str, about: object = "") -> None:
        self._events.append((ranks, words, about))
        if len(self._events) > _MAX_EVENTS:
            self._events = self._last_events()

    def _last_events(self) -> list[_Event]:
        """Returns the events that hold what each rank has done last."""
        kept: list[_Event] = []
        ranks: set[int] = set()
        for event in reversed(self._events):
            if not ranks.issuperset(event[0]):
                kept.append(event)
                ranks.update(event[0])
                if len(ranks) == self.world_size:
                    break
        return kept[::-1]

    def _on_late(self, rank: int, header: Header) -> list[Message]:
        to_do = clip_head(str(header["to_do"]), 200)
        self._num_said[to_do] += 1
        if self._num_said[to_do] > _MAX_SAID:
            return []
        status = self._status(header)
        who = name_ranks(status["missing"]) if status["missing"] else "the others"
        text = f"farspan: rank {rank} has waited {int(header['for_s'])} s for {who} {to_do}"
        lines = [text, *status["notes"]]
        self._late[rank] = status["missing"], self._describe(rank)
        for other in status["missing"]:
            missing, did_last = self._late.get(other, ((), ""))
            if rank in missing and did_last == self._describe(other):
                lines.append(f"rank {other} has waited for rank {rank}: {EACH_OTHER}")
        return [Message((0,), {"t": "say", "text": "\n  ".join(lines)})]

    def _status(self, header: Header) -> Header:
        """Returns who is missing, which of them could answer, and what they did last."""
        everyone = self.ranks
        if "step" in header:
            has_begun = self._who_has_begun(header["step"])
            missing = [r for r in everyone if r not in has_begun]
        elif "key" in header:
            parts = self._gathers.get(header["key"], Parts())
            missing = [r for r in everyone if r not in parts.ranks]
        elif "rank" in header:
            missing = [header["rank"]]
        else:
            missing = [r for r in everyone if r not in self.finished]
        notes = [f"rank {r}: {self._describe(r)}" for r in missing[:_MAX_NOTES]]
        if len(missing) > _MAX_NOTES:
            notes.append(f"and {len(missing) - _MAX_NOTES} more")
        if self._dispute is not None:
            notes.append(f"the programs differ; yet to show what was recorded: {name_ranks(self._dispute.missing)}")
        there = self.joined - self.ended - self.died
        here = [r for r in missing if r in there]
        return {"missing": missing, "here": here, "notes": notes}

    def _describe(self, rank: int) -> str:
        if rank in self.died:
            return "died"
        if rank not in self.joined:
            return "has never connected"
        last = next((event for event in reversed(self._events) if rank in event[0]), None)
        if last is None:
            return "has done nothing yet"
        _, words, about = last
        return f"the last it did was: {words.format(clip_head(about, 80) if isinstance(about, str) else about)}"

    def _who_has_begun(self, step: int) -> Collection[int]:
        """Returns the ranks that have begun this step, or one after it."""
        if step <= self._agreed_step:
            return self.ranks
        return {r for each in self._rounds for ranks, begun in each.entries if begun.step >= step for r in ranks}


def _groups(entries: Iterable[tuple[Sequence[int], Begun]]) -> list[tuple[Sequence[int], tuple[int, int]]]:
    """Returns groups of ranks that have begun the same, with that."""
    found: dict[Begun, list[int]] = {}
    for ranks, begun in entries:
        found.setdefault(begun, []).extend(ranks)
    return [(ranks, (begun.step, begun.digest)) for begun, ranks in found.items()]
