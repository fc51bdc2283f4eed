"""The programs of a rank's steps: made once for all steps that look alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from farspan.graph import Graph
from farspan.program.cached import Layout, layout_of
from farspan.program.lower import build_program
from farspan.program.options import Settings
from farspan.program.pattern import Pattern, pattern_of
from farspan.program.program import Program
from farspan.program.route import take_turns

__all__ = ["Programs"]

_MOST_KEPT = 8
"""Patterns: steps of training, of evaluation, the last one of an epoch, which is shorter."""


class Programs:
    """Makes programs, and keeps what those of the latest patterns have in common."""

    def __init__(self) -> None:
        self._latest: deque[tuple[Pattern, Layout | None]] = deque(maxlen=_MOST_KEPT)
        """The latest one first; a layout is made at the end of the second step of a pattern."""
        self._is_due = False
        """True if the latest program is to get its layout."""

    @property
    def num_kept(self) -> int:
        return len(self._latest)

    def program_of(self, graphs: Sequence[Graph], settings: Settings) -> Program:
        """Returns what `build_program` gives, with less work where steps like this one were among the latest."""
        take_turns(graphs, settings.teams)
        known = pattern_of(graphs, settings)
        if known is None:
            self._is_due = False
            return build_program(graphs, settings)
        pattern, sources = known
        layout = self._layout_of(pattern)
        return build_program(graphs, settings) if layout is None else layout.bind(graphs, sources)

    def end_step(self) -> None:
        """The step whose program was asked for last is over, and what it has recorded released: a layout takes about as
        much memory while it is made.
        """
        if self._is_due:
            pattern, _ = self._latest.popleft()
            self._latest.appendleft((pattern, layout_of(pattern)))
            self._is_due = False

    def _layout_of(self, pattern: Pattern) -> Layout | None:
        for number, (known, layout) in enumerate(self._latest):
            if known == pattern:
                del self._latest[number]
                self._latest.appendleft((known, layout))
                self._is_due = layout is None
                return layout
        self._latest.appendleft((pattern, None))
        self._is_due = False
        return None
