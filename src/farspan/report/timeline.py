"""A timeline of what every rank did, when: the value that all reports are made from.

    rank 0   F0 F1 F2 F3 .. B0    B1    B2    B3       F, B, W tasks: these are "busy"
    rank 1      F0 B0    F1 B1    F2 B2    F3 B3       .       waiting for a message
             |<------------ duration_s ----------->|   bubble  the share of the area that is not busy

The window, which every number is clipped to, runs from the start of the first task to the end of the
last one on any rank: a rank that stood ready long before the step does not make the step longer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from farspan.documents import as_count, as_list, as_object, as_text, parse_json
from farspan.errors import PlanError, quoted

__all__ = ["TASKS", "Kind", "Span", "Timeline"]

Kind = Literal["F", "B", "W", "wait", "send", "recv"]
_KINDS: frozenset[str] = frozenset(get_args(Kind))
TASKS: tuple[Kind, ...] = ("F", "B", "W")
_MOST_NS = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One thing that one rank did from `start_ns` to `end_ns`.

    Attributes:
        rank: Who.
        kind: F, B or W (a task: forward, backward or weight gradients of one segment), wait (for a message), send,
            recv.
        name: What, for people: "blocks.0-5", "activation of blocks.5 from rank 0".
        micro_batch: Number of the micro-batch, from 0; -1 where there is none.
        start_ns: Start, on a clock that all ranks of the timeline share.
        end_ns: End, not before the start.

    Raises:
        ValueError: The kind is unknown, the rank negative, or the end before the start.
    """

    rank: int
    kind: Kind
    name: str
    micro_batch: int = -1
    start_ns: int
    end_ns: int

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"kind is {self.kind!r}; it must be one of {', '.join(get_args(Kind))}")
        if self.rank < 0:
            raise ValueError(f"rank is {self.rank} in span {self.name!r}")
        if self.end_ns < self.start_ns:
            early_ns = self.start_ns - self.end_ns
            raise ValueError(f"span {self.name!r} of rank {self.rank} ends {early_ns} ns before it starts")

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The spans of one step on all ranks, and the numbers that follow from them.

    Attributes:
        spans: In any order; spans of one rank may overlap (a wait around a receive), shares never exceed 1.
        num_ranks: All ranks, also those without any span: an idle rank counts in the bubble.
        names: What people know each of them by, where that is not "rank 0", "rank 1", ..: a rank's further devices come
            after all ranks.
        title: What was measured, for people.

    Raises:
        ValueError: A span belongs to a rank that is not below `num_ranks`.

    >>> forward = Span(rank=0, kind="F", name="a", micro_batch=0, start_ns=0, end_ns=10_000_000)
    >>> backward = Span(rank=1, kind="B", name="b", micro_batch=0, start_ns=10_000_000, end_ns=40_000_000)
    >>> timeline = Timeline(spans=(forward, backward), num_ranks=2)
    >>> timeline.duration_s, timeline.busy_share(1), timeline.bubble
    (0.04, 0.75, 0.5)
    """

    spans: tuple[Span, ...]
    num_ranks: int
    title: str = ""
    names: tuple[str, ...] = ()

    # Derived once, for the numbers of a thousand ranks must not each walk all spans.
    _of_rank: tuple[tuple[Span, ...], ...] = field(init=False, repr=False, compare=False)
    _window_ns: tuple[int, int] = field(init=False, repr=False, compare=False)
    _has_tasks: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        of_rank: list[list[Span]] = [[] for _ in range(self.num_ranks)]
        for span in self.spans:
            if span.rank >= self.num_ranks:
                raise ValueError(f"span {span.name!r} is of rank {span.rank}, but num_ranks={self.num_ranks}")
            of_rank[span.rank].append(span)
        tasks = [s for s in self.spans if s.kind in TASKS]
        window = tasks or self.spans
        start_ns = min((s.start_ns for s in window), default=0)
        end_ns = max((s.end_ns for s in window), default=0)
        object.__setattr__(self, "_of_rank", tuple(map(tuple, of_rank)))
        object.__setattr__(self, "_window_ns", (start_ns, end_ns))
        object.__setattr__(self, "_has_tasks", bool(tasks))

    def name_of(self, rank: int) -> str:
        """Returns the name by which people know a rank."""
        return self.names[rank] if self.names else f"rank {rank}"

    @property
    def window_ns(self) -> tuple[int, int]:
        """Start of the first task and end of the last; without tasks, of all spans; (0, 0) when empty."""
        return self._window_ns

    @property
    def duration_s(self) -> float:
        """Seconds from the start of the first task to the end of the last; 0.0 without tasks."""
        if not self._has_tasks:
            return 0.0
        start_ns, end_ns = self._window_ns
        return (end_ns - start_ns) / 1e9

    @property
    def num_micro_batches(self) -> int:
        """Returns how many micro-batches the tasks belong to."""
        return len({s.micro_batch for s in self.spans if s.kind in TASKS and s.micro_batch >= 0})

    @property
    def bubble(self) -> float:
        """Share of (ranks x duration) in which no task ran, 0 to 1; 0.0 without tasks."""
        area_s = self.num_ranks * self.duration_s
        if not area_s:
            return 0.0
        return 1.0 - sum(self.busy_s(rank) for rank in range(self.num_ranks)) / area_s

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """Returns the spans of one rank."""
        return self._of_rank[rank]

    def time_s(self, rank: int, *kinds: Kind) -> float:
        """Returns seconds of the window in which `rank` was in a span of any of `kinds`; overlaps count once."""
        start_ns, end_ns = self._window_ns
        pieces = sorted((s.start_ns, s.end_ns) for s in self._of_rank[rank] if s.kind in kinds)
        total_ns, covered_ns = 0, start_ns
        for piece_start_ns, piece_end_ns in pieces:
            piece_end_ns = min(piece_end_ns, end_ns)
            total_ns += max(0, piece_end_ns - max(piece_start_ns, covered_ns))
            covered_ns = max(covered_ns, piece_end_ns)
        return total_ns / 1e9

    def busy_s(self, rank: int) -> float:
        """Returns seconds in which `rank` ran tasks."""
        return self.time_s(rank, *TASKS)

    def busy_share(self, rank: int) -> float:
        """Share of the duration in which `rank` ran tasks, 0 to 1; 0.0 without tasks."""
        duration_s = self.duration_s
        return self.busy_s(rank) / duration_s if duration_s else 0.0

    def wait_s(self, rank: int) -> float:
        """Returns seconds in which `rank` waited for messages, between the first task and the last of any rank."""
        return self.time_s(rank, "wait")

    def to_json(self) -> str:
        """Returns the timeline as compact JSON text: `to_json().encode()` is what ranks send each other."""
        rows = [[s.rank, s.kind, s.name, s.micro_batch, s.start_ns, s.end_ns] for s in self.spans]
        value: dict[str, object] = {"title": self.title, "num_ranks": self.num_ranks, "spans": rows}
        if self.names:
            value["names"] = list(self.names)
        return json.dumps(value, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "this timeline") -> Timeline:
        """Returns the timeline that `to_json` wrote.

        Raises:
            PlanError: It is none; names the key at fault.
        """
        return cls.from_value(parse_json(text, source), source)

    @classmethod
    def from_value(cls, value: object, where: str) -> Timeline:
        """Returns the same of what stands in a larger document, at `where`.

        Raises:
            PlanError: It is none; names the key at fault.
        """
        keys = ("title", "num_ranks", "spans")
        members = as_object(value, where, known=(*keys, "names"), needed=keys)
        num_ranks = as_count(members["num_ranks"], f"{where}: num_ranks")
        rows = as_list(members["spans"], f"{where}: spans")
        names = as_list(members["names"], f"{where}: names", length=num_ranks) if "names" in members else ()
        return cls(
            spans=tuple(_span(row, num_ranks, f"{where}: spans[{i}]") for i, row in enumerate(rows)),
            num_ranks=num_ranks,
            title=as_text(members["title"], f"{where}: title"),
            names=tuple(as_text(name, f"{where}: names") for name in names),
        )

    @classmethod
    def merge(cls, timelines: Iterable[Timeline]) -> Timeline:
        """Returns one timeline with the spans of all; its title is the first that is not empty.

        The clocks must agree already: ranks of one host share `time.monotonic_ns`, hosts do not.
        """
        parts = list(timelines)
        spans = sorted((s for part in parts for s in part.spans), key=lambda s: (s.start_ns, s.rank, s.end_ns))
        return cls(
            spans=tuple(spans),
            num_ranks=max((part.num_ranks for part in parts), default=0),
            title=next((part.title for part in parts if part.title), ""),
            names=next((part.names for part in parts if part.names), ()),
        )


def _span(row: object, num_ranks: int, where: str) -> Span:
    rank, kind, name, micro_batch, start_ns, end_ns = as_list(row, where, length=6)
    if kind not in get_args(Kind):
        raise PlanError(f"{where}: kind is {quoted(kind)}.", why=f"kinds are {', '.join(get_args(Kind))}.", hint='"F"')
    start_ns = as_count(start_ns, f"{where}: start_ns", least=-_MOST_NS, most=_MOST_NS)
    return Span(
        rank=as_count(rank, f"{where}: rank", most=num_ranks - 1),
        kind=cast(Kind, kind),
        name=as_text(name, f"{where}: name"),
        micro_batch=as_count(micro_batch, f"{where}: micro_batch", least=-1),
        start_ns=start_ns,
        end_ns=as_count(end_ns, f"{where}: end_ns", least=start_ns, most=_MOST_NS),
    )
