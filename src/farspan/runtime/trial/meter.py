"""An executor that takes the time of everything it runs, and looks closely at one micro-batch.

micro-batch      0           1  2  ..
                 looked at   timed
                 (warm-up)

In a dry run only micro-batch 0 is run, on tensors without data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from farspan.errors import FarspanError, PlanError
from farspan.graph import EVERYWHERE, Graph, Part, Segment, Value
from farspan.lazy import Leaf, Unknown
from farspan.lazy.torch_private import FakeTensorMode, is_fake, raw_grad
from farspan.lazy.watch import storage_id
from farspan.profile.step import Operation
from farspan.runtime.engine import Engine
from farspan.runtime.step.executor import Executor
from farspan.runtime.step.program import Program, Step
from farspan.runtime.trial.work import counted, kept
from farspan.runtime.trial.working import Working

__all__ = ["Input", "Measured", "Meter", "Sample", "SegmentNote", "needs_data"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A value that a segment takes from outside.

    Attributes:
        source: Level and stage of the segment that makes it; None for a parameter.
        stage: Where it comes from.
        size_bytes: Its size.
        name: The parameter's, or a name for the value.
    """

    source: tuple[int, int] | None
    stage: int
    size_bytes: int
    name: str


@dataclass(slots=True, kw_only=True)
class SegmentNote:
    """One segment of the micro-batch that was looked at."""

    key: tuple[int, int]
    """Level and stage."""
    is_called: bool
    """Whether a module is called in it as a whole."""
    inputs: list[Input]
    likeness: str
    """Equal for segments that do the same."""
    saved_bytes: int = 0
    working_bytes: int = 0
    """What it needs besides, while it runs."""
    saved_outputs: set[str] = field(default_factory=set[str])
    """Names of the outputs that its own backward needs."""
    forward: list[Operation] = field(default_factory=list[Operation])
    backward: list[Operation] = field(default_factory=list[Operation])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """How long a task of one micro-batch took."""

    graph: int
    key: tuple[int, int]
    is_forward: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was noted of some micro-batches.

    Attributes:
        notes: Of the segments of the one that was looked at, by level and stage.
        samples: Of all.
        graphs: The micro-batches of which a backward has run, in order.
        looked_at: One of them.
        is_dry: Whether nothing was computed.
    """

    notes: Mapping[tuple[int, int], SegmentNote]
    samples: Sequence[Sample]
    graphs: Collection[int]
    looked_at: int
    is_dry: bool = False


class Meter(Executor):
    """Runs programs on one rank and notes what they take.

    Args:
        engine: Whose executor it becomes.
        mode: In which nothing is computed; None for a run that is timed.
        ended: Called when a dry run is over; raises.
        about_to_time: Called with the signature of a step of several micro-batches before it is run; may raise.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        mode: FakeTensorMode | None,
        ended: Callable[[], None],
        about_to_time: Callable[[tuple[object, ...]], None],
    ) -> None:
        super().__init__(
            engine.channels,
            parameters=engine.parameters,
            device_of=lambda stage: engine.stages[stage].device,
            check=engine.check,
        )
        self.mode = mode
        self.ended = ended
        self.about_to_time = about_to_time
        self.notes: dict[tuple[int, int], SegmentNote] = {}
        self.samples: list[Sample] = []
        self.graphs: dict[int, None] = {}
        """Micro-batches of which a backward has run, in order."""
        self.looked_at = -1
        self._own_memory: set[int] = set()
        self._working = Working()

    @property
    def is_dry(self) -> bool:
        return self.mode is not None

    def measured(self) -> Measured:
        return Measured(
            notes=self.notes,
            samples=self.samples,
            graphs=tuple(self.graphs),
            looked_at=self.looked_at,
            is_dry=self.is_dry,
        )

    def run(self, program: Program) -> None:
        if self.is_dry:
            self._refuse_unknown(program)
        trained = dict.fromkeys(part.backward.graph.index for part in program.parts)
        if not self.graphs:
            first = min(trained) if trained else _first_graph(program)
            if first != self.looked_at:
                self.notes, self.looked_at = {}, first
        self._own_memory = {
            storage_id(item.tensor) for item in self.parameters.values() if item.tensor.layout is torch.strided
        }
        if self.mode is None and len(trained) > 1 and not self.graphs:
            works = [step.work for step in program.steps if isinstance(step.work, Segment)]
            first = [work for work in works if work.graph.index == self.looked_at]
            self.about_to_time((len(trained), *((_key(work), _note_of(work).likeness) for work in first)))
        if self.mode is None or not any(map(_is_trained, program.steps)):
            super().run(program)
            self.graphs.update(trained)
            return
        self.graphs.update(trained)
        program.steps = [step for step in program.steps if _graph_of(step).index in (self.looked_at, -1)]
        try:
            with self.mode:
                fakes = [
                    self.mode.from_tensor(item.tensor) for item in self.parameters.values() if not is_fake(item.tensor)
                ]
                self._own_memory.update(map(storage_id, fakes))
                super().run(program)
        except FarspanError:
            raise
        except Exception as error:
            raise needs_data(error) from error
        self.ended()

    def _refuse_unknown(self, program: Program) -> None:
        """A call that is to be learned from a real run cannot be."""
        for step in program.steps:
            for call in step.work.calls:
                if type(call.entry) is Unknown:
                    raise needs_data(RuntimeError(f"what {call.describe()} gives depends on its data"))

    def _forward(self, segment: Segment) -> None:
        if segment.graph.index != self.looked_at:
            super()._forward(segment)
            return
        note = self.notes[_key(segment)] = _note_of(segment)
        begin = self._working.begin()
        with self._working, counted(note.forward), kept(self._own_memory) as found:
            super()._forward(segment)
        note.saved_bytes = sum(found.sizes.values())
        note.saved_outputs = {_name_of(each) for each in segment.outputs if storage_id(each.data) in found.sizes}
        note.working_bytes = max(0, self._working.peak(begin, self._own_memory) - note.saved_bytes)

    def _backward(self, part: Part, *, leaves_weights: bool) -> None:
        note = self.notes.get(_key(part.segment or part))
        if part.backward.graph.index != self.looked_at or note is None:
            super()._backward(part, leaves_weights=leaves_weights)
            return
        begin = self._working.begin()
        with self._working, counted(note.backward):
            super()._backward(part, leaves_weights=leaves_weights)
        gradients = [raw_grad(item.tensor) for item in self.parameters.values() if item.is_parameter]
        apart = self._own_memory | {storage_id(gradient) for gradient in gradients if gradient is not None}
        given = sum(edge.meta.numel * edge.meta.dtype.itemsize for edge in part.incoming)
        note.working_bytes = max(note.working_bytes, given + self._working.peak(begin, apart))

    def _trace(self, kind: Any, step: Step, began_ns: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now_ns = time.perf_counter_ns()
        super()._trace(kind, step, began_ns)
        if kind != "wait":
            work = step.work
            self.samples.append(
                Sample(
                    graph=_graph_of(step).index,
                    key=_key(work if isinstance(work, Segment) else work.segment or work),
                    is_forward=kind == "F",
                    seconds=(now_ns - began_ns) / 1e9,
                )
            )


def needs_data(error: BaseException) -> PlanError:
    """The error for what cannot be done without data."""
    return PlanError(
        "the step cannot be counted without data.",
        why=(f"{type(error).__name__}: {error}".splitlines() or [""])[0],
        hint="plan for devices of this machine's kind, without --roofline: the step is then measured here",
    )


def _first_graph(program: Program) -> int:
    return next((step.work.graph.index for step in program.steps if isinstance(step.work, Segment)), -1)


def _graph_of(step: Step) -> Graph:
    return step.work.graph if isinstance(step.work, Segment) else step.work.backward.graph


def _is_trained(step: Step) -> bool:
    """Whether the step is a backward, or a forward that one may follow."""
    return isinstance(step.work, Part) or any(call.entry.requires_grad for call in step.work.calls)


def _key(work: Segment | Part) -> tuple[int, int]:
    return (work.level if isinstance(work, Segment) else -1, work.stage)


def _note_of(segment: Segment) -> SegmentNote:
    calls = segment.calls
    inputs = [_input_of(value, segment) for value in segment.inputs if value.stage != EVERYWHERE]
    likeness = tuple(
        (_likeness_of(call.target), tuple(map(_shape, call.arguments or ())), tuple(map(str, call.entry.metas)))
        for call in calls
    )
    is_called = any(type(call.target) is Leaf for call in calls)
    return SegmentNote(key=_key(segment), is_called=is_called, inputs=inputs, likeness=repr(likeness))


def _input_of(value: Value, segment: Segment) -> Input:
    size = value.meta.numel * value.meta.dtype.itemsize
    if value.call is None:
        return Input(source=None, stage=value.stage, size_bytes=size, name=value.name or str(value.key))
    same = value.call.graph is segment.graph
    return Input(
        source=_key(value.call.segment) if same else None,
        stage=value.stage,
        size_bytes=size,
        name=_name_of(value),
    )


def _name_of(value: Value) -> str:
    return ".".join(map(str, value.key))


def _likeness_of(target: Any) -> Any:
    if type(target) is not Leaf:
        return getattr(target, "__name__", repr(target))
    placed: Iterable[Any] = target.placed
    return (repr(target.module), target.state_key(), tuple(str(item.meta) for item in placed))


def _shape(item: Any) -> str:
    return str(item.meta) if isinstance(item, Value) else f"{item.dtype}{tuple(item.shape)}"
