"""The steps that ranks have begun and that have not been agreed on: what each rank begins as its n-th one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from farspan.runtime.side.wire import ProtocolError

if TYPE_CHECKING:
    from farspan.runtime.side.wire import Header

__all__ = ["Begun", "Round", "Rounds"]


class Begun(NamedTuple):
    """A step that one rank has begun, or several that agree."""

    step: int
    digest: int
    data: tuple[int | None, ...]
    """Digests of the data given, of which one must be equal on all ranks; empty where there are none. None in the place
    of one that is not equal on all of these ranks."""

    @classmethod
    def of(cls, header: Header) -> Begun:
        """As a message says it."""
        return cls(header["step"], header["digest"], tuple(header.get("data", ())))


@dataclass(slots=True)
class Round:
    """What ranks have begun as their n-th step.

    Attributes:
        entries: Who began what, as it came.
        num_ranks: How many ranks have come, also of those whose entries have been passed on.
        is_agreed: None of them differs.
        is_old: It waits for others since the last look.
    """

    entries: list[tuple[Sequence[int], Begun]] = field(default_factory=list[tuple[Sequence[int], Begun]])
    num_ranks: int = 0
    is_agreed: bool = True
    is_old: bool = False
    _merged: Begun | None = None

    def add(self, ranks: Sequence[int], begun: Begun) -> None:
        self.entries.append((ranks, begun))
        self.num_ranks += len(ranks)
        merged = begun if self._merged is None else self._merged
        if (begun.step, begun.digest, len(begun.data)) != (merged.step, merged.digest, len(merged.data)):
            self.is_agreed = False
            return
        data = tuple(a if a == b else None for a, b in zip(merged.data, begun.data, strict=True))
        self._merged = merged._replace(data=data)
        if data and all(each is None for each in data):
            self.is_agreed = False

    def take(self) -> list[tuple[Sequence[int], Begun]]:
        """The entries that have come since this was called last; one, where all agree."""
        entries, self.entries = self.entries, []
        if not self.is_agreed or self._merged is None or not entries:
            return entries
        return [(sorted(rank for ranks, _ in entries for rank in ranks), self._merged)]


class Rounds:
    """The open rounds of some ranks.

    Args:
        ranks: All that take part.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.next = dict.fromkeys(ranks, 0)
        """For each rank, at which position it begins its next step."""
        self.open: dict[int, Round] = {}
        """By position, in order."""

    def add(self, ranks: Sequence[int], begun: Begun) -> tuple[int, Round]:
        """These ranks begin a step; returns its place in the order of their steps, and who else has begun one there."""
        position = self.next[ranks[0]]
        for rank in ranks:
            if self.next[rank] != position:
                raise ProtocolError(f"steps of ranks {ranks[0]} and {rank} in one message, of which one has begun more")
            self.next[rank] = position + 1
        found = self.open.get(position)
        if found is None:
            found = self.open[position] = Round()
        found.add(ranks, begun)
        return position, found
