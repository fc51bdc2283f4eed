"""The steps that ranks have begun and that have not been agreed on: what each rank begins as its n-th one."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from farspan.control.wire import ProtocolError

if TYPE_CHECKING:
    from farspan.control.wire import Header

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
        """Returns the step that a message announces."""
        return cls(header["step"], header["digest"], tuple(header.get("data", ())))


@dataclass(slots=True)
class Round:
    """The beginnings of one step: what ranks have begun as their n-th step.

    Attributes:
        entries: Who began what, as it came.
        ranks: Who has come, also those whose entries have been passed on.
        is_agreed: None of them differs.
        is_old: It waits for others since the last look.
    """

    entries: list[tuple[Sequence[int], Begun]] = field(default_factory=list[tuple[Sequence[int], Begun]])
    ranks: set[int] = field(default_factory=set[int])
    is_agreed: bool = True
    is_old: bool = False
    _merged: Begun | None = None

    def add(self, ranks: Sequence[int], begun: Begun) -> None:
        self.entries.append((ranks, begun))
        self.ranks.update(ranks)
        merged = begun if self._merged is None else self._merged
        if (begun.step, begun.digest, len(begun.data)) != (merged.step, merged.digest, len(merged.data)):
            self.is_agreed = False
            return
        if begun.data != merged.data:
            data = tuple(a if a == b else None for a, b in zip(merged.data, begun.data, strict=True))
            merged = merged._replace(data=data)
            self.is_agreed &= any(each is not None for each in data)
        self._merged = merged

    def take(self) -> list[tuple[Sequence[int], Begun]]:
        """Returns the entries that have come since this was called last; one, where all agree."""
        entries, self.entries = self.entries, []
        if not self.is_agreed or self._merged is None or not entries:
            return entries
        return [(sorted(rank for ranks, _ in entries for rank in ranks), self._merged)]


class Rounds:
    """The open rounds of some ranks.

    Args:
        num_ranks: How many take part.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._open: deque[Round] = deque()

    def __iter__(self) -> Iterator[Round]:
        """Iterates over the open rounds, in order."""
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)

    def add(self, ranks: Sequence[int], begun: Begun) -> Round:
        """Notes that these ranks, each there once, begin a step; returns the round in which they do.

        Raises:
            ProtocolError: Not all of them have begun as many steps before.
        """
        found = self.next_of(ranks[0])
        if found is None:
            found = Round()
            self._open.append(found)
        if len(ranks) > 1:
            is_next = found.ranks.isdisjoint(ranks)
            if not is_next or any(not each.ranks.issuperset(ranks) for each in self.before(found)):
                raise ProtocolError(f"{len(ranks)} ranks in one message that have not begun as many steps")
        found.add(ranks, begun)
        return found

    def next_of(self, rank: int) -> Round | None:
        """Returns the open round in which a rank begins its next step; None where it is the first there."""
        for each in self._open:
            if rank not in each.ranks:
                return each
        return None

    def before(self, found: Round) -> list[Round]:
        """Returns the open rounds before one of them."""
        return list(itertools.takewhile(lambda each: each is not found, self._open))

    def close_first(self) -> Round | None:
        """Returns the first round, if all ranks have come to it: it is no longer open."""
        return self._open.popleft() if self._open and len(self._open[0].ranks) == self._num_ranks else None

    def clear(self) -> None:
        self._open.clear()
