"""The programs differ: the ranks involved show what they have recorded, and the first difference becomes an error.

Up to 32 ranks all show theirs. Of more, one of each group that has begun the same speaks for the others of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from farspan.control.hub.divergence import HINT, NO_END, describe_difference, describe_ended
from farspan.control.text import describe_failure

if TYPE_CHECKING:
    from farspan.control.hub.divergence import History, ProgramEnd
    from farspan.control.wire import Buffer, Header

__all__ = ["Dispute"]

_T = TypeVar("_T")
_MAX_ASKED = 32


class Dispute:
    """A difference between programs, until it is known what differs and where.

    Args:
        groups: Ranks that have begun the same, each with that step and its digest.
        ended: Ranks whose programs are over, where that is the difference.
        gone: Ranks that can no longer be asked.
        ends: Where programs that are over have ended, of the ranks that have said so.

    Attributes:
        missing: Ranks that have not yet shown what they recorded.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[int], tuple[int, int]]],
        ended: Sequence[int],
        gone: set[int],
        ends: Mapping[int, ProgramEnd],
    ) -> None:
        there = [([rank for rank in ranks if rank not in gone] or ranks, begun) for ranks, begun in groups]
        asks_all = sum(len(ranks) for ranks, _ in groups) <= _MAX_ASKED
        self._speaker = {
            rank: rank if asks_all else min(others)
            for (ranks, _), (others, _) in list(zip(groups, there, strict=True))[:_MAX_ASKED]
            for rank in ranks
        }
        """For each rank in dispute, the rank that is asked on its behalf."""
        self.starts = {rank: begun for ranks, begun in groups for rank in ranks if rank in self._speaker}
        self._ended = {rank: ends.get(rank, NO_END) for rank in ended}
        self._histories: dict[int, History] = {}
        self._raised: dict[int, Header] = {}
        """Exceptions that the programs of some of these ranks have raised meanwhile."""
        self.missing = set(self._speaker.values()) - gone

    def step_of(self, rank: int) -> int:
        """Returns the step that a rank has begun."""
        return self.starts[rank][0]

    def show(self, rank: int, header: Header, payload: Buffer) -> None:
        """A rank shows what it has recorded."""
        entries = json.loads(bytes(payload))
        self._histories[rank] = [
            (int(digest), str(words), str(more[0]) if more else "", str(more[1]) if len(more) > 1 else "")
            for digest, words, *more in entries
        ]
        if header.get("raised"):
            self._raised[rank] = header["raised"]
        self.missing.discard(rank)

    def failure(self) -> Header:
        """Returns the failure that the difference means."""
        histories = self._of_all(self._histories)
        if self._ended:
            what, why, hint = describe_ended(self._ended, self.starts, histories)
            hint = hint or _hint_of(histories) or HINT
        else:
            what, why, hint = describe_difference(self.starts, histories)
        by_rank = self._of_all(self._raised)
        raised = {by_rank[rank]["what"] if rank in by_rank else "" for rank in self.starts}
        if len(raised) > 1:  # where all have raised the same, it is not why they differ
            rank, header = min(self._raised.items())
            return describe_failure(rank, header, f"{what}\n{why}")
        return {"kind": "DivergenceError", "rank": -1, "what": what, "why": why, "hint": hint}

    def _of_all(self, found: Mapping[int, _T]) -> dict[int, _T]:
        return {rank: found[speaker] for rank, speaker in self._speaker.items() if speaker in found}


def _hint_of(histories: Mapping[int, History]) -> str:
    """Returns what the waiting ranks say is worth a try."""
    for _, entries in sorted(histories.items()):
        for entry in entries[-1:]:
            if len(entry) > 2 and entry[2]:
                return entry[2]
    return ""
