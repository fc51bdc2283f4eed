"""The programs of a rank's steps: made once for all steps that look alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from farspan.graph import Graph
from farspan.runtime.program.build import build_program
from farspan.runtime.program.layout import Layout, layout_of
from farspan.runtime.program.pattern import Pattern, pattern_of, stand_ins
from farspan.runtime.program.program import Program
from farspan.runtime.program.settings import Settings

__all__ = ["Programs"]

_MOST_KEPT = 8
"""Patterns: steps of training, of evaluation, the last one of an epoch, which is shorter."""


class Programs:
    """Makes programs, and keeps what those of the latest patterns have in common."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Pattern, Layout]] = deque(maxlen=_MOST_KEPT)
        """The latest one first."""

    def program_of(self, graphs: Sequence[Graph], settings: Settings) -> Program:
        """What `build_program` gives, with less work where a step like this one was among the latest."""
        known = pattern_of(graphs, settings)
        if known is None:
            return build_program(graphs, settings)
        pattern, sources = known
        return self._layout_of(pattern).bind(graphs, sources)

    def _layout_of(self, pattern: Pattern) -> Layout:
        for number, (known, layout) in enumerate(self._kept):
            if known == pattern:
                del self._kept[number]
                break
        else:
            known, step = pattern, stand_ins(pattern)
            layout = layout_of(build_program(step.graphs, pattern.settings), step)
        self._kept.appendleft((known, layout))
        return layout
