"""One recorded micro-batch: its calls in program order, cut into segments as they arrive (`graph.cut`).

Calls, values, segments and graphs know each other. When it has run, the ways from the whole to its parts are cut
(`release`), so that what is over ends with the last tensor that the program holds of it, without waiting for Python's
cycle collector: that looks at what has lived for a while only when there is a quarter more of it, which a training loop
takes for a leak.
"""

from __future__ import annotations

import copy
import hashlib
import weakref
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from farspan.graph.call import Call, MicroBatch, ModuleTarget, Segment, Value

if TYPE_CHECKING:
    from farspan.graph.backward import Backward, BackwardSegment

__all__ = ["OUTPUT_BITS", "Graph", "release"]

OUTPUT_BITS = 32
"""Number of low bits of a position that hold the number of a call's output; the call's number is in those above."""
_CALL, _SOURCE, _BACKWARD, _MORE = range(4)
"""Kinds of entries in `Graph.content`: each comes before the numbers of its entry."""


class Graph(MicroBatch):
    """One micro-batch as a graph. Its `content` says the same in numbers, equal on all ranks that recorded the same."""

    __slots__ = (
        "_module_calls",
        "_names",
        "_num_read",
        "_read_level",
        "content",
        "floor",
        "model_calls",
        "record",
        "sources",
    )

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.sources: dict[Value, int] = {}
        """Values from outside this graph, numbered in order of first use."""
        self.backwards: list[Backward]
        self.content = array("q")
        """A few numbers for each call, source and backward; never the `hash` of anything, for -1 and -2 have the
        same."""
        self.record: list[tuple[Any, ...]] = []
        """The target, entry, stage and level of each call, and where its arguments come from. Graphs with equal records
        are cut alike, and gradients go the same ways in them if their sources are alike.
        """
        self._read_level: dict[tuple[Value, int], int] = {}
        """The deepest level at which a stage uses a value, for the first `_num_read` calls."""
        self._num_read = 0
        self.model_calls: list[tuple[int, int, Any]] = []
        """What the program has called from outside any module: number of the first call, of the one behind the last (-1
        while it runs), and the program's line."""
        self.floor = 0
        """The least level of the calls to come: what was recorded before a hook is in earlier segments."""
        self._module_calls: list[Call] = []
        """The calls of modules, which use parameters by their names."""
        self._names: set[str] = set()
        """Names of parameters that are used outside their one leaf."""

    def begin_model(self, where: Any) -> None:
        """The program calls a module from its own code, at a line."""
        self.model_calls.append((len(self.calls), -1, where))

    def end_model(self) -> None:
        """The module that was called last has returned."""
        if self.model_calls:
            self.model_calls[-1] = (self.model_calls[-1][0], len(self.calls), self.model_calls[-1][2])

    def line_of(self, call: Call) -> Any:
        """Returns the program's line that has called the module in which `call` was made; its own where there is
        none."""
        for first, end, where in reversed(self.model_calls):
            if first <= call.index and (end < 0 or call.index < end):
                return where
        return call.where

    def add(self, call: Call, values: Sequence[Value], *, at_least: int = 0) -> None:
        """Append `call`, whose lazy arguments are `values`, and place it in its segment."""
        sources = [
            segment
            for value in values
            if (segment := value.segment) is not None and not segment.executed and segment.graph is self
        ]
        if at_least < self.floor:
            at_least = self.floor
        self._put(call, values, self.segment_for(call, call.stage, sources, at_least))

    def put(self, call: Call, values: Sequence[Value], level: int) -> None:
        """Append `call`, whose lazy arguments are `values`, to the segment of this level."""
        self._put(call, values, self.segment_at(level, call.stage))

    def _put(self, call: Call, values: Sequence[Value], segment: Segment) -> None:
        for value in values:
            source = value.segment
            if source is not segment:
                segment.inputs[value] = None
                if source is None or source.executed or source.graph is not self:
                    self.add_source(value)
                if source is not None and not source.executed:
                    source.outputs[value] = None
        call.graph = self
        call.segment = segment
        call.level = segment.level
        call.index = len(self.calls)
        segment.calls.append(call)
        self.calls.append(call)
        if isinstance(call.target, ModuleTarget):
            self._module_calls.append(call)

    def cut_behind(self, call: Call) -> None:
        """Keeps calls up to `call` and calls after it in different segments: a backward can stop between them
        (`graph.backward`)."""
        calls, records = self.calls, self.record
        floor = 1 + max(item.level for item in calls[: call.index + 1])
        shift = max(0, floor - min((item.level for item in calls[call.index + 1 :]), default=floor))
        self.floor = max(floor, self.floor + shift)
        if not shift:
            return
        self.clear()
        self.record = []
        for item, note in zip(calls, records, strict=True):
            level, arguments = item.level + (shift if item.index > call.index else 0), item.arguments or ()
            unused = item.entry.unused
            self.put(item, [arg for i, arg in enumerate(arguments) if type(arg) is Value and i not in unused], level)
            for output in item.outputs:
                output.segment = item.segment
            self.record.append((*note[:3], level, *note[4:]))

    def clear(self) -> None:
        super().clear()
        self._module_calls = []
        self._read_level, self._num_read = {}, 0

    def read_level(self, value: Value, stage: int) -> int:
        """Returns the deepest level at which calls of `stage` use `value`; 0 if none does."""
        for call in self.calls[self._num_read :]:
            for number, used in enumerate(call.arguments or ()):
                if type(used) is Value and number not in call.entry.unused:
                    key = (used, call.stage)
                    self._read_level[key] = max(call.level, self._read_level.get(key, 0))
        self._num_read = len(self.calls)
        return self._read_level.get((value, stage), 0)

    def make_segment(self, index: int, level: int, stage: int) -> Segment:
        return Segment(self, index, level, stage)

    def segment_of(self, call: Call) -> Segment:
        return call.segment

    def receiving(self, call: Call) -> list[Any]:
        """Yields values, names of parameters and the call's own leaf, to which `call` passes gradient."""
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
        """Notes that parameters which only one leaf has used so far have another user."""
        for name in names:
            self._names.add(name)
            users = [call.segment for call in self._module_calls if name in call.target.parameter_names]
            if users:
                self._last_user[name] = max(users, key=lambda user: user.order)

    def note(self, call: Call, values: Sequence[Value], digest: int) -> None:
        """Adds `call`, the latest one, to the record and the digest.

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
        """Adds to what was noted last, for example where the draws of the call stand in the program."""
        self.content.extend((_MORE, *path))

    def note_backward(self, backward: Backward, digest: int) -> None:
        """Adds `backward`, the latest one, to the digest.

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
        """Returns the number of a value that comes from outside this graph."""
        number = self.sources.get(value)
        if number is None:
            number = self.sources[value] = len(self.sources)
            self.content.extend((_SOURCE, value.stage, *value.identity))
        return number

    def positions(self, values: Sequence[Value]) -> tuple[int, ...]:
        """Returns where values come from, in numbers that are the same on every rank: the call and its output, or,
        negative, the source.
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
        """Releases the graph, which has run."""
        self.clear()
        self.record, self.backwards, self.sources = [], [], {}
        self.content = array("q")


class _Living(Sequence[Any]):
    """The outputs of a call through which a backward may still come; None for those that nothing refers to any more."""

    def __init__(self, values: Iterable[Value]) -> None:
        self._references: list[Any] = [weakref.ref(value) for value in values]

    def __len__(self) -> int:
        return len(self._references)

    def __getitem__(self, index: Any) -> Any:
        return self._references[index]()


def release(graphs: Sequence[Graph], released: Iterable[Call], parts: Iterable[BackwardSegment]) -> None:
    """Drop data, arguments and autograd graphs that nothing can ask for any more.

    Args:
        graphs: All that has run.
        released: Calls that a backward has gone through, and none can again; some may be of graphs that ran before.
        parts: Of the backwards that have run.
    """
    run = {graph.index for graph in graphs}
    for call in released:
        if call.segment.graph.index not in run and call.arguments is not None:
            call.segment.num_open -= 1
            _end_if_over(call.segment)
        _end(call)
    _keep_feeding(graphs)
    for graph in graphs:
        for segment in graph.segments:
            segment.executed = True
            segment.num_open = sum(map(_can_go_back, segment.calls))
            segment.calls = []
            segment.outputs.clear()
            _end_if_over(segment)
        graph.end()
    for part in parts:
        if part.backward.stops is None:  # others may have to go on
            part.forget()


def _keep_feeding(graphs: Sequence[Graph]) -> None:
    """Lets calls through which a backward may still come know how those of their arguments were computed to which no
    gradient flows: the program may ask for gradients with a history, for which all is computed again.

    They know copies, so that what only the program still holds (a running mean) does not hold what it was made of.
    """
    calls = [
        call for graph in graphs for call in graph.calls if call.arguments is not None and call.entry.requires_grad
    ]
    copies: dict[Call, Call] = {}
    for call in calls:
        for item in call.arguments or ():
            made = item.call if type(item) is Value else None
            if made is None or made.arguments is None or made.entry.requires_grad:
                continue
            if made not in copies:
                copies[made] = copy.copy(made)
                calls.append(made)
    for call in calls if copies else ():
        copies.get(call, call).feeding = {
            item: copies[item.call] for item in call.arguments or () if type(item) is Value and item.call in copies
        }


def _end_if_over(segment: Segment) -> None:
    if not segment.num_open:
        segment.inputs.clear()
        segment.leaves.clear()
        segment.entries.clear()


def _can_go_back(call: Call) -> bool:
    """Returns whether a backward through the call may still come; what only such a one needs is dropped."""
    is_differentiable = False
    for value in call.outputs:
        needs_gradient = value.meta.requires_grad
        is_differentiable |= needs_gradient
        if not needs_gradient or call.arguments is None:
            if not value.is_held:
                value.data = None
            elif needs_gradient and value.data is not None:
                value.data = value.data.detach()  # without the graph that has been used
    if not is_differentiable or call.arguments is None:
        _end(call)
        return False
    call.outputs = _Living(call.outputs)
    return True


def _end(call: Call) -> None:
    """Nothing goes back through it."""
    call.arguments = None
    call.outputs = ()
    call.buffers, call.feeding = {}, {}
