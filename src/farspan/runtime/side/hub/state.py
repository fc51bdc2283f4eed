"""What rank 0's hub decides, as a pure state machine: a message in, messages out; no sockets, no clocks, no threads.

    to the hub                                       from the hub
    start       step, digest, data                   agreed      step              (all began it with one digest)
    history     query + entries                      history     query, step       (programs differ: show yours)
    contribute  key + blob                           gathered    key, sizes + blobs
                                                     void        key, what         (can never be complete)
    (any with "to": a message for that rank)         (the same, "to" replaced by "from")
    fail        what, why, hint, traceback           failure     the error, to all but its origin; noted, to the origin
    status      id, step | key | rank | nothing      status      id, missing, here, notes
    late        to_do, for_s, what a status has      say         text              (to rank 0)
    finish      step, digest (still answers)         finished                      (all ranks have, with one digest)
    bye                                              ended       rank

The first failure wins: after it the hub answers only `status` and counts goodbyes. Unknown messages are ignored, so
that the protocol can grow.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from farspan.runtime.side.hub.divergence import HINT, History, describe_difference, describe_ended
from farspan.runtime.side.text import (
    clip_head,
    describe_death,
    describe_failure,
    describe_large_gather,
    describe_lost_link,
    name_ranks,
)
from farspan.runtime.side.wire import MAX_PAYLOAD_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from farspan.runtime.side.wire import Buffer, Header

__all__ = ["Hub", "Message"]

_MAX_NOTES = 4


@dataclass(frozen=True, slots=True)
class Message:
    """One message from the hub to some ranks."""

    to: tuple[int, ...]
    header: Header
    payload: Buffer = b""


@dataclass(slots=True)
class _Dispute:
    """The programs differ; the histories of the ranks involved are on their way."""

    starts: dict[int, tuple[int, int]]
    ended: list[int]
    awaited: set[int]
    histories: dict[int, History]
    raised: dict[int, Header]
    """What the programs of some of these ranks have raised meanwhile."""


class _Begun(NamedTuple):
    """A step that a rank has begun."""

    step: int
    digest: int
    data: tuple[int, ...]
    """Digests of the data given, of which one must be equal on all ranks; empty where there are none."""


class _End(NamedTuple):
    """The end of a rank's program: the step that it would begin, and the digest of what it did since the last one."""

    step: int
    digest: int


def _agree(begun: Collection[_Begun]) -> bool:
    steps = {(each.step, each.digest, len(each.data)) for each in begun}
    columns = list(zip(*[each.data for each in begun], strict=False))
    return len(steps) == 1 and (not columns or any(len(set(column)) == 1 for column in columns))


class Hub:
    """Agreement, gathers, relayed messages, failures and goodbyes of `world_size` ranks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.joined: set[int] = set()
        self.finished: set[int] = set()
        """Ranks whose program is over: they begin no step any more, but may still answer."""
        self.ended: set[int] = set()
        """Ranks that have said bye; also in `finished`."""
        self.died: set[int] = set()
        """Ranks whose connection closed without a goodbye."""
        self.failed = False
        # For each rank what it began and not all ranks have agreed on.
        self._begun: list[deque[_Begun]] = [deque() for _ in range(world_size)]
        self._ends: dict[int, _End] = {}
        """Of ranks whose program is over."""
        self._gathers: dict[str, dict[int, Buffer]] = {}
        self._dispute: _Dispute | None = None
        self._num_queries = 0
        self._last_step: dict[int, int] = {}
        self._last_event: dict[int, str] = {}

    def on_joined(self, rank: int) -> list[Message]:
        """A rank has connected; its first message comes after this."""
        self.joined.add(rank)
        return []

    def on_message(self, rank: int, header: Header, payload: Buffer = b"") -> list[Message]:
        """A rank says something."""
        kind = header.get("t")
        if kind == "bye":
            self.ended.add(rank)
            return self._on_finish(rank, header, [Message(self._others(), {"t": "ended", "rank": rank})])
        if kind == "status":
            return [Message((rank,), {"t": "status", "id": header["id"], **self._status(header)})]
        if self.failed:
            # Whoever fails second must not wait for an answer either.
            return [Message((rank,), {"t": "noted"})] if kind == "fail" else []
        if kind == "late":
            return [Message((0,), {"t": "say", "text": self._describe_late(rank, header)})]
        if "to" in header:
            return self._relay(rank, header, payload)
        if kind == "start":
            return self._on_start(rank, _Begun(header["step"], header["digest"], tuple(header.get("data", ()))))
        if kind == "contribute":
            return self._on_contribute(rank, header["key"], payload)
        if kind == "history":
            return self._on_history(rank, header, payload)
        if kind == "fail":
            return self._on_fail(rank, header)
        if kind == "finish":
            return self._on_finish(rank, header, [])
        return []

    def on_gone(self, rank: int) -> list[Message]:
        """A rank's connection has closed."""
        if rank in self.ended or rank in self.died:
            return []
        self.died.add(rank)
        if self.failed:
            return []
        return self._publish(**describe_death(rank))

    def on_silent(self, rank: int) -> list[Message]:
        """No sign of life has come from a rank's host for long. That rank gets the failure too: it may still hear."""
        return [] if self.failed or rank in self.ended else self._publish(**describe_lost_link(rank))

    def on_shutdown(self) -> list[Message]:
        """The hub ends now, whoever is still there."""
        if self.failed:
            return []
        return self._publish(
            kind="RemoteError",
            rank=0,
            what="rank 0 has ended its program while this rank still runs",
            why="the side channel's hub lives in rank 0's process and has waited for its linger time",
            hint="make every rank run the same number of steps",
        )

    def _others(self, ranks: Iterable[int] = ()) -> tuple[int, ...]:
        """All ranks that may still listen, less `ranks`."""
        return tuple(sorted(set(range(self.world_size)) - self.ended - self.died - set(ranks)))

    def _publish(
        self,
        *,
        kind: str,
        rank: int,
        what: str,
        why: str,
        hint: str,
        traceback: str = "",
        not_to: tuple[int, ...] = (),
    ) -> list[Message]:
        self.failed = True
        self._dispute = None
        self._gathers.clear()
        header = {"t": "failure", "kind": kind, "rank": rank, "what": what, "why": why, "hint": hint}
        return [Message(self._others(not_to), {**header, "traceback": traceback})]

    # -- agreement ----------------------------------------------------------------------------------------------------

    def _on_start(self, rank: int, begun: _Begun) -> list[Message]:
        step = begun.step
        self._last_step[rank] = step
        self._last_event[rank] = f"began step {step}"
        position = len(self._begun[rank])
        self._begun[rank].append(begun)
        if self._dispute is not None:
            return []
        at_position = self._begun_at(position)
        if not _agree(at_position.values()):
            return self._open_dispute(at_position, [])
        ended = [r for r in sorted(self.finished) if len(self._begun[r]) <= position]
        if ended:
            return self._open_dispute(at_position, ended)
        if len(at_position) < self.world_size:
            return []
        # Each rank's entries agree up to here position by position, so this is the oldest one of all.
        for queue in self._begun:
            queue.popleft()
        return [Message(self._others(), {"t": "agreed", "step": step})]

    def _begun_at(self, position: int) -> dict[int, _Begun]:
        return {rank: begun[position] for rank, begun in enumerate(self._begun) if len(begun) > position}

    def _open_dispute(self, begun: Mapping[int, _Begun | _End], ended: list[int]) -> list[Message]:
        starts = {rank: (each.step, each.digest) for rank, each in begun.items()}
        awaited = set(starts) - self.ended - self.died
        self._num_queries += 1
        self._dispute = _Dispute(starts=starts, ended=ended, awaited=awaited, histories={}, raised={})
        if not awaited:
            return self._close_dispute()
        return [
            Message((rank,), {"t": "history", "query": self._num_queries, "step": starts[rank][0]})
            for rank in sorted(awaited)
        ]

    def _on_history(self, rank: int, header: Header, payload: Buffer) -> list[Message]:
        dispute = self._dispute
        if dispute is None or header["query"] != self._num_queries or rank not in dispute.awaited:
            return []
        dispute.histories[rank] = [
            (int(entry[0]), str(entry[1]), str(entry[2]) if len(entry) > 2 else "")
            for entry in json.loads(bytes(payload))
        ]
        if header.get("raised"):
            dispute.raised[rank] = header["raised"]
        dispute.awaited.discard(rank)
        return self._close_dispute() if not dispute.awaited else []

    def _close_dispute(self) -> list[Message]:
        dispute = self._dispute
        assert dispute is not None
        hint = HINT
        if dispute.ended:
            what, why = describe_ended(dispute.ended, dispute.starts, dispute.histories)
        else:
            what, why, hint = describe_difference(dispute.starts, dispute.histories)
        raised = {dispute.raised[rank]["what"] if rank in dispute.raised else "" for rank in dispute.starts}
        if len(raised) > 1:  # where all have raised the same, it is not why they differ
            rank, header = min(dispute.raised.items())
            return self._publish(**describe_failure(rank, header, f"{what}\n{why}"))
        return self._publish(kind="DivergenceError", rank=-1, what=what, why=why, hint=hint)

    # -- gathers and relays -------------------------------------------------------------------------------------------

    def _on_contribute(self, rank: int, key: str, payload: Buffer) -> list[Message]:
        self._last_event[rank] = f"gave its part of {clip_head(key, 80)!r}"
        parts = self._gathers.setdefault(key, {})
        parts[rank] = payload
        size_bytes = sum(map(len, parts.values()))
        if size_bytes > MAX_PAYLOAD_BYTES:
            return self._publish(**describe_large_gather(key, size_bytes))
        if len(parts) < self.world_size:
            missing = self.finished - parts.keys()
            return [self._void(key, missing, (rank,))] if missing else []
        del self._gathers[key]
        blobs = [parts[r] for r in range(self.world_size)]
        header = {"t": "gathered", "key": key, "sizes": [len(blob) for blob in blobs]}
        return [Message(self._others(), header, b"".join(blobs))]

    def _void(self, key: str, missing: set[int], to: tuple[int, ...]) -> Message:
        verb = "has ended its program" if len(missing) == 1 else "have ended their programs"
        what = f"{name_ranks(missing)} {verb} without giving a part of {clip_head(key, 80)!r}"
        return Message(to, {"t": "void", "key": key, "what": what})

    def _relay(self, rank: int, header: Header, payload: Buffer) -> list[Message]:
        to = header["to"]
        if header.get("t") == "request":
            self._last_event[rank] = f"asked rank {to} for a value"
        if not 0 <= to < self.world_size or to in self.ended or to in self.died:
            return []
        passed_on = {name: value for name, value in header.items() if name != "to"}
        return [Message((to,), {**passed_on, "from": rank}, payload)]

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _on_fail(self, rank: int, header: Header) -> list[Message]:
        published = self._publish(**describe_failure(rank, header), not_to=(rank,))
        return [*published, Message((rank,), {"t": "noted"})]

    def _on_finish(self, rank: int, header: Header, messages: list[Message]) -> list[Message]:
        """The rank begins no step and gives no part of a gather any more."""
        first_time = rank not in self.finished
        self.finished.add(rank)
        if "digest" in header:
            self._ends[rank] = _End(header["step"], header["digest"])
        self._last_event[rank] = "ended its program"
        if self.failed:
            return []
        if first_time:
            for key, parts in self._gathers.items():
                if rank not in parts:
                    messages.append(self._void(key, {rank}, tuple(r for r in sorted(parts) if r not in self.ended)))
            if len(self.finished) == self.world_size and not any(self._begun) and self._dispute is None:
                if len(set(self._ends.values())) > 1:
                    return [*messages, *self._open_dispute(self._ends, [])]
                messages.append(Message(self._others(), {"t": "finished"}))
        dispute = self._dispute
        if dispute is not None:
            # Who has said bye cannot show its history any more.
            dispute.awaited -= self.ended
            return messages if dispute.awaited else [*messages, *self._close_dispute()]
        waiting = self._begun_at(len(self._begun[rank]))
        return [*messages, *self._open_dispute(waiting, [rank])] if waiting else messages

    def _describe_late(self, rank: int, header: Header) -> str:
        status = self._status(header)
        who = name_ranks(status["missing"]) if status["missing"] else "the others"
        to_do = clip_head(str(header["to_do"]), 200)
        text = f"farspan: rank {rank} has waited {int(header['for_s'])} s for {who} {to_do}"
        return "\n  ".join([text, *status["notes"]])

    def _status(self, header: Header) -> Header:
        """Who is missing, which of them could answer, and what they did last."""
        everyone = range(self.world_size)
        if "step" in header:
            step = header["step"]
            missing = [r for r in everyone if r not in self._last_step or self._last_step[r] < step]
        elif "key" in header:
            missing = [r for r in everyone if r not in self._gathers.get(header["key"], {})]
        elif "rank" in header:
            missing = [header["rank"]]
        else:
            missing = [r for r in everyone if r not in self.finished]
        notes = [f"rank {r}: {self._describe(r)}" for r in missing[:_MAX_NOTES]]
        if len(missing) > _MAX_NOTES:
            notes.append(f"and {len(missing) - _MAX_NOTES} more")
        if self._dispute is not None:
            notes.append(f"the programs differ; yet to show what was recorded: {name_ranks(self._dispute.awaited)}")
        here = [r for r in missing if r in self.joined - self.ended - self.died]
        return {"missing": missing, "here": here, "notes": notes}

    def _describe(self, rank: int) -> str:
        if rank in self.died:
            return "died"
        if rank not in self.joined:
            return "has never connected"
        event = self._last_event.get(rank)
        return f"the last it did was: {event}" if event else "has done nothing yet"
