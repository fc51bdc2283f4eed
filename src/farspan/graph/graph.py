r"""One recorded micro-batch: its calls in program order, cut into segments as they arrive.

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

import hashlib
from array import array
from typing import TYPE_CHECKING, Any

from farspan.graph.call import Call, MicroBatch, Segment, Value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farspan.graph.backward import Backward

__all__ = ["OUTPUT_BITS", "Graph"]

OUTPUT_BITS = 32
"""Of a position: the number of a call's output; the number of the call stands before it."""
_CALL, _SOURCE, _BACKWARD, _MORE = range(4)
"""What the numbers that follow in `Graph.content` are about."""


class Graph(MicroBatch):
    """What one micro-batch does. `content` says it in numbers, the same on all ranks that recorded the same."""

    __slots__ = (
        "_by_level",
        "_last_user",
        "_latest",
        "_names",
        "_num_noted",
        "content",
        "floor",
        "read_level",
        "record",
        "segments",
        "sources",
    )

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.segments: list[Segment] = []
        self.sources: dict[Value, int] = {}
        """Values from outside this graph, numbered in order of first use."""
        self.backwards: list[Backward]
        self.content = array("q")
        """For each call, source and backward a few numbers, never the `hash` of anything: -1 and -2 have the same."""
        self.record: list[tuple[Any, ...]] = []
        """By call: target, entry, stage, level, and which of its arguments come from where. Graphs with equal records
        are cut alike, and gradients go the same ways in them, if their sources are alike.
        """
        self.read_level: dict[tuple[Value, int], int] = {}
        """The deepest level at which a stage uses a value."""
        self.floor = 0
        """The least level of the calls to come: what was recorded before a hook is in earlier segments."""
        self._by_level: dict[tuple[int, int], Segment] = {}
        self._last_user: dict[Any, Segment] = {}
        """By value, leaf, or name of a parameter: the segment that last used it and passes gradient on to it; of the
        first `_num_noted` calls, for as long as all calls are in the latest segment nobody asks.
        """
        self._num_noted = 0
        self._latest: Segment | None = None
        self._names: set[str] = set()
        """Of parameters that others than one leaf use."""

    def add(self, call: Call, values: Sequence[Value], *, at_least: int = 0) -> None:
        """Append `call`, whose lazy arguments are `values`, and place it in its segment."""
        stage = call.stage
        level = max(at_least, self.floor)
        for value in values:
            segment = value.segment
            if segment is None or segment.executed or segment.graph is not self:
                continue
            needed = segment.level if segment.stage == stage else segment.level + 1
            if needed > level:
                level = needed
        latest = self._latest
        if latest is not None and level <= latest.level and self._by_level.get((level, stage)) is not latest:
            level = self._level_after_users(call, level)
        self.put(call, values, level)

    def put(self, call: Call, values: Sequence[Value], level: int) -> None:
        """Append `call`, whose lazy arguments are `values`, to the segment of this level."""
        stage, latest = call.stage, self._latest
        segment = self._by_level.get((level, stage))
        if segment is None:
            segment = Segment(self, len(self.segments), level, stage)
            self._by_level[level, stage] = segment
            self.segments.append(segment)
            if latest is None or segment.order > latest.order:
                self._latest = segment
        for value in values:
            if level >= self.read_level.get((value, stage), 0):
                self.read_level[value, stage] = level
            source = value.segment
            if source is not segment:
                segment.inputs[value] = None
                if source is None or source.executed or source.graph is not self:
                    self.add_source(value)
                if source is not None and not source.executed:
                    source.outputs[value] = None
        call.graph = self
        call.segment = segment
        call.level = level
        call.index = len(self.calls)
        segment.calls.append(call)
        self.calls.append(call)

    def cut_behind(self, call: Call) -> None:
        """Let no segment have calls up to `call` and after it: a backward can stop between them (`graph.backward`)."""
        calls, records = self.calls, self.record
        floor = 1 + max(item.level for item in calls[: call.index + 1])
        shift = max(0, floor - min((item.level for item in calls[call.index + 1 :]), default=floor))
        self.floor = max(floor, self.floor + shift)
        if not shift:
            return
        self.calls, self.record, self.segments, self.read_level = [], [], [], {}
        self._by_level, self._last_user, self._latest, self._num_noted = {}, {}, None, 0
        for item, note in zip(calls, records, strict=True):
            level, arguments = item.level + (shift if item.index > call.index else 0), item.arguments or ()
            unused = item.entry.unused
            self.put(item, [arg for i, arg in enumerate(arguments) if type(arg) is Value and i not in unused], level)
            for output in item.outputs:
                output.segment = item.segment
            self.record.append((*note[:3], level, *note[4:]))

    def _level_after_users(self, call: Call, level: int) -> int:
        """The least level for `call`, from `level` on, not before those that used what it passes gradient to."""
        for earlier in self.calls[self._num_noted :]:
            for key in self._receiving(earlier):
                self._last_user[key] = earlier.segment
        self._num_noted = len(self.calls)
        users = [self._last_user.get(key) for key in self._receiving(call)]
        later = [user for user in users if user is not None and user.level >= level]
        if not later:
            return level
        user = max(later, key=lambda user: user.order)
        if call.stage == user.stage:
            return user.level
        existing = self._by_level.get((user.level, call.stage))
        return user.level if existing is None or existing.index > user.index else user.level + 1

    def _receiving(self, call: Call) -> list[Any]:
        """What `call` passes gradient on to: values, names of parameters, its own leaf."""
        arguments, entry = call.arguments, call.entry
        assert arguments is not None
        found: list[Any] = []
        for number in entry.differentiable:
            value = arguments[number]
            if type(value) is Value:
                if value.name and value.name not in self._names:
                    self.name_parameters([value.name])
                found.append(value.name or value)
        if entry.requires_grad:
            names = getattr(call.target, "parameter_names", None)
            if names:
                found += call.target.receivers
                if self._names:
                    found += self._names & names
        return found

    def name_parameters(self, names: Sequence[str]) -> None:
        """These parameters, which only one leaf has used so far, have another user."""
        for name in names:
            self._names.add(name)
            users = [call.segment for call in self.calls if name in getattr(call.target, "parameter_names", ())]
            if users:
                self._last_user[name] = max(users, key=lambda user: user.order)

    def note(self, call: Call, values: Sequence[Value], digest: int) -> None:
        """Put `call`, which has been added, down in the record and the digest.

        Args:
            call: The latest one.
            values: Its lazy arguments, all of them.
            digest: Of what is called and what it gives, the same number on every rank.
        """
        positions = self.positions(values)
        assert call.arguments is not None
        are_lazy = () if len(values) == len(call.arguments) else tuple([type(item) is Value for item in call.arguments])
        self.record.append((call.target, call.entry, call.stage, call.level, positions, are_lazy))
        self.content.extend((_CALL, digest, call.stage, len(positions), *positions, *are_lazy))

    def note_path(self, path: Sequence[int]) -> None:
        """Add more about what was noted last: where the draws of the call stand in the program, say."""
        self.content.extend((_MORE, *path))

    def note_backward(self, backward: Backward, digest: int) -> None:
        """Put `backward`, which has been added, down in the digest.

        Args:
            backward: The latest one.
            digest: Of how it runs, the same number on every rank.
        """
        positions = self.positions(backward.roots)
        has_gradient = [gradient is not None for gradient in backward.gradients]
        self.content.extend((_BACKWARD, digest, len(positions), *positions, *has_gradient))

    @property
    def digest(self) -> int:
        """A number that is equal on all ranks exactly if they recorded the same."""
        return int.from_bytes(hashlib.blake2b(self.content.tobytes(), digest_size=8).digest(), "big")

    def add_source(self, value: Value) -> int:
        """The number of a value that comes from outside this graph."""
        number = self.sources.get(value)
        if number is None:
            number = self.sources[value] = len(self.sources)
            self.content.extend((_SOURCE, value.stage, *value.identity))
        return number

    def positions(self, values: Sequence[Value]) -> tuple[int, ...]:
        """Where values come from, the same numbers on every rank: the call and which of its outputs, or, negative, the
        number of the source.
        """
        positions: list[int] = []
        for value in values:
            source = self.sources.get(value)
            if source is not None:
                positions.append(-1 - source)
            elif value.call is None or value.call.graph is not self:
                positions.append(-1 - self.add_source(value))
            else:
                positions.append(value.call.index << OUTPUT_BITS | value.index)
        return tuple(positions)

    def end(self) -> None:
        """It has run."""
        self.calls, self.record, self.segments, self.backwards = [], [], [], []
        self.sources, self.read_level, self._by_level, self._last_user = {}, {}, {}, {}
        self._latest = None
        self.content = array("q")
