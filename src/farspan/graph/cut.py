r"""Cuts a graph into segments that one stage can run without waiting in the middle. Calls that are recorded are cut so
as they arrive, and the nodes of a graph with costs, of which a plan is made.

    level(call) = max over its inputs of level(producer) + (1 if the producer's stage differs)

Calls of equal (level, stage) form a segment, so the segments of a graph are acyclic by construction. A call that passes
gradient on to a value or a parameter is in no segment before that of its user before this one: gradients are added up
segment by segment, the latest first, which is then the order of one process. A U shape over two stages, each box a
segment:

    stage 0   [embed, blocks 0-3]                 [head, loss]
                     level 0  \                  /  level 2
    stage 1                    [blocks 4-7]  ----
                                 level 1
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Cut"]


class _Segment(Protocol):
    """The protocol of a segment, for the code that cuts a graph."""

    @property
    def level(self) -> int: ...

    @property
    def stage(self) -> int: ...

    @property
    def index(self) -> int:
        """Returns how many segments have begun before it."""
        ...

    @property
    def order(self) -> tuple[int, ...]:
        """A total order that follows the data."""
        ...


S = TypeVar("S", bound=_Segment)
C = TypeVar("C")


class Cut(Generic[C, S]):
    """The segments of one graph, to which its calls come one by one. Subclasses say what they are made of."""

    __slots__ = ("_by_level", "_last_user", "_latest", "_num_noted", "calls", "segments")

    def __init__(self) -> None:
        self.calls: list[C] = []
        """All calls so far, in the order in which they were made."""
        self.segments: list[S] = []
        self._by_level: dict[tuple[int, int], S] = {}
        self._last_user: dict[Any, S] = {}
        """Maps what gets gradient to the segment that last used it and passes gradient on to it. It covers the first
        `_num_noted` calls: while all calls are in the latest segment, it is not needed.
        """
        self._num_noted = 0
        self._latest: S | None = None

    def make_segment(self, index: int, level: int, stage: int) -> S:
        """Returns a new segment, without calls."""
        raise NotImplementedError

    def segment_of(self, call: C) -> S:
        """Returns the segment of a call that has been placed."""
        raise NotImplementedError

    def receiving(self, call: C) -> Sequence[Any]:
        """Yields what `call` passes gradient on to."""
        raise NotImplementedError

    def segment_for(self, call: C, stage: int, sources: Iterable[S], at_least: int = 0) -> S:
        """Returns the segment of the next call.

        Args:
            call: Which comes next.
            stage: That runs it.
            sources: The segments of this graph whose values it uses.
            at_least: The least level that it may have.
        """
        level = at_least
        for segment in sources:
            needed = segment.level if segment.stage == stage else segment.level + 1
            if needed > level:
                level = needed
        found, latest = self._by_level.get((level, stage)), self._latest
        if found is not latest and latest is not None and level <= latest.level:
            level = self._level_after_users(call, stage, level)
            found = None
        return found or self.segment_at(level, stage)

    def segment_at(self, level: int, stage: int) -> S:
        """Returns the segment of this level and stage."""
        segment = self._by_level.get((level, stage))
        if segment is None:
            segment = self._by_level[level, stage] = self.make_segment(len(self.segments), level, stage)
            self.segments.append(segment)
            if self._latest is None or segment.order > self._latest.order:
                self._latest = segment
        return segment

    def clear(self) -> None:
        """Forget all calls and segments."""
        self.calls, self.segments = [], []
        self._by_level, self._last_user, self._latest, self._num_noted = {}, {}, None, 0

    def _level_after_users(self, call: C, stage: int, level: int) -> int:
        """Returns the least level for `call`, from `level` on, that is not before those that used what it passes
        gradient to."""
        for earlier in self.calls[self._num_noted :]:
            segment = self.segment_of(earlier)
            for key in self.receiving(earlier):
                self._last_user[key] = segment
        self._num_noted = len(self.calls)
        users = [self._last_user.get(key) for key in self.receiving(call)]
        later = [user for user in users if user is not None and user.level >= level]
        if not later:
            return level
        user = max(later, key=lambda user: user.order)
        if stage == user.stage:
            return user.level
        existing = self._by_level.get((user.level, stage))
        return user.level if existing is None or existing.index > user.index else user.level + 1
