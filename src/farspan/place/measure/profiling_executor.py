"""An executor that takes the time of everything it runs, and looks closely at one micro-batch.

micro-batch      0            1                    2                    3        ..
                 profiled     profiled: what       timed, backwards     timed
                 (warm-up)    split ones leave     split

In a dry run only micro-batches 0 and 1 are run, on tensors without data; where there is no second one, the backward
of the first is split.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.infer.entry import Unknown
from farspan.call.infer.watch import storage_id
from farspan.call.leaf import Leaf
from farspan.devices import wait_for_current_stream
from farspan.errors import FarspanError, PlanError
from farspan.execute.abort.interruption import Interruption
from farspan.execute.agreement.step_start import StepStart
from farspan.execute.engine import Engine
from farspan.execute.step.executor import Executor
from farspan.execute.teams import device_of
from farspan.graph import EVERYWHERE, BackwardSegment, MicroBatch, Segment, Value
from farspan.place.measure.measurements import Input, Kinds, Measured, Sample, SegmentNote
from farspan.place.measure.micro_batches import Key, MicroBatches, Place, place_of
from farspan.place.measure.work import counted, kept
from farspan.place.measure.working_memory import Working, hand_over
from farspan.profile.step import Operation
from farspan.program.lower import has_weights
from farspan.program.program import Action, Program
from farspan.progress import Progress
from farspan.schedule import Kind
from farspan.torch_private import FakeTensorMode, is_fake, raw_grad

if TYPE_CHECKING:
    from farspan.call.leaf import Target

__all__ = ["ProfilingExecutor", "needs_data"]

_LOOKED_AT = 0
"""The micro-batch that is."""


class ProfilingExecutor(Executor):
    """Runs programs on one rank and notes what they take.

    Args:
        engine: Whose executor it becomes.
        mode: In which nothing is computed; None for a run that is timed.
        ended: Called when a dry run is over; raises.
        about_to_time: Called with the signature of a step of several micro-batches before it is run; may raise.
        has_run: Called after each task, with how many have run and how many are known of.
    """

    measures = True

    def __init__(
        self,
        engine: Engine,
        *,
        mode: FakeTensorMode | None,
        ended: Callable[[], None],
        about_to_time: Callable[[tuple[object, ...]], None],
        has_run: Callable[[int, int], None] = lambda num_run, num_known: None,
    ) -> None:
        super().__init__(
            engine.channels,
            parameters=engine.parameters,
            device_of=lambda work: device_of(engine.teams[work.stage].member(work.turn)),
            check=engine.check,
            takes_cpu=lambda: engine.takes_cpu,
        )
        self.mode = mode
        self.ended = ended
        self.about_to_time = about_to_time
        self.has_run = has_run
        self.notes: dict[tuple[int, int], SegmentNote] = {}
        self.micro_batches = MicroBatches()
        self.gradient_bytes: dict[str, int] = {}
        """Bytes that the gradient of a value or parameter takes where it arrives, by name."""
        self._split_micro_batch = -1
        """The micro-batch that is profiled for what its backwards leave for the gradients of weights."""
        self._unsettled: list[SegmentNote] = []
        """Notes of graphs that may belong to the first micro-batch."""
        self.taken: list[tuple[int, Place, Kinds, float]] = []
        """Graph, place, kind, seconds."""
        self._num_known = 0
        """Tasks of all programs that have begun."""
        self._was_split = False
        """True if the backward that ran last was split."""
        self._console = engine.console
        self._progress = Progress("")
        self._open_backwards = Counter[int]()
        """Backwards that have not run, by micro-batch of the program that runs."""
        self._num_in_program = 0
        self._num_to_come = 0
        """Parts of the backward of `split_one` on this rank."""
        self._has_seen_all = False
        self._trains: dict[object, bool] = {}
        self._own_memory: set[int] = set()
        self._working = Working()
        if engine.sanitizer is not None and mode is None:  # fakes have nothing to compare
            engine.sanitizer.watch_executor(self)

    @property
    def is_dry(self) -> bool:
        return self.mode is not None

    def measured(self) -> Measured:
        return Measured(
            notes=self.notes,
            samples=[
                Sample(
                    number=self.micro_batches.number_at(graph),
                    key=self.micro_batches.key_at(place),
                    kind=kind,
                    seconds=s,
                )
                for graph, place, kind, s in self.taken
            ],
            num_micro_batches=self.num_micro_batches,
            split_micro_batch=self._split_micro_batch,
            gradient_bytes=self.gradient_bytes,
            is_dry=self.is_dry,
        )

    def run(self, program: Program, interruption: Interruption, start: StepStart | None = None) -> None:
        if self.is_dry:
            self._refuse_unknown(program)
        self._num_known += len(program.actions)
        num_before = self.num_micro_batches
        self.micro_batches.see([_graph_of(action) for action in program.actions], program.reaches)
        if num_before == 0 and self.num_micro_batches:
            self._settle_notes()
        self._split_micro_batch = 1 if self.num_micro_batches > 1 else 0 if self.is_dry else -1
        own = [action.work for action in program.actions if action.kind is Kind.BACKWARD]
        self._num_to_come = sum(
            isinstance(work, BackwardSegment) and self._number_of(work) == self._split_micro_batch for work in own
        )
        self._own_memory = {
            storage_id(item.tensor) for item in self.parameters.values() if item.tensor.layout is torch.strided
        }
        num_trained = self.num_micro_batches - num_before
        if self.mode is None and num_trained > 1 and num_before == 0:
            works = [action.work for action in program.actions if isinstance(action.work, Segment)]
            first = [work for work in works if self._number_of(work) == _LOOKED_AT]
            self.about_to_time((num_trained, *((self._key(work), self._note_of(work).likeness) for work in first)))
        if self.mode is None or not any(map(_is_trained, program.actions)):
            self._run_measured(program, interruption, start)
            return
        if start is not None:
            start.announce()  # which looks at data: fakes have none
        chosen = (_LOOKED_AT, self._split_micro_batch, -1)
        program.actions = [action for action in program.actions if self._number_of(action.work) in chosen]
        program.reductions = [each for each in program.reductions if self._number_of(each.part) in chosen]
        try:
            with self.mode:
                fakes = [
                    self.mode.from_tensor(item.tensor) for item in self.parameters.values() if not is_fake(item.tensor)
                ]
                self._own_memory.update(map(storage_id, fakes))
                super().run(program, interruption)
            if interruption.raised is not None:
                raise interruption.raised.error
        except FarspanError:
            raise
        except Exception as error:
            raise needs_data(error) from error
        self.ended()

    def _run_measured(self, program: Program, interruption: Interruption, start: StepStart | None) -> None:
        """Runs a program, and says how far it is where it trains and takes long."""
        backwards = [self._number_of(each.work) for each in program.actions if each.kind is Kind.BACKWARD]
        self._open_backwards = Counter(backwards)
        self._num_in_program = len(self._open_backwards)
        if not backwards:
            super().run(program, interruption, start)
            return
        with self._console.said_if_slow("measuring the first step") as self._progress:
            self._note_progress()
            super().run(program, interruption, start)

    def _note_progress(self) -> None:
        num_done = self._num_in_program - len(self._open_backwards)
        self._progress.note(num_done, self._num_in_program, "micro-batches")

    @property
    def num_micro_batches(self) -> int:
        """Returns the number of micro-batches of which a backward has run."""
        return self.micro_batches.num_trained

    def _settle_notes(self) -> None:
        for note in self._unsettled:
            key = self.micro_batches.settled(note.key, _LOOKED_AT)
            if key is not None:
                note.key = key
                note.inputs = [
                    replace(each, source=each.source and self.micro_batches.settled(each.source, _LOOKED_AT))
                    for each in note.inputs
                ]
                self.notes[key] = note
        self._unsettled.clear()

    def _number_of(self, work: Segment | BackwardSegment) -> int:
        """Returns the number of the micro-batch that it belongs to; for a backward, the one that ends with it."""
        return self.micro_batches.number_of(work.graph if isinstance(work, Segment) else work.backward.graph)

    def _key(self, work: Segment | BackwardSegment) -> Key:
        return self.micro_batches.key_of(work)

    def _refuse_unknown(self, program: Program) -> None:
        """A call that is to be resolved by a real run cannot be."""
        for action in program.actions:
            for call in action.work.calls:
                if type(call.entry) is Unknown:
                    raise needs_data(RuntimeError(f"what {call.describe()} gives depends on its data"))

    def _forward(self, segment: Segment) -> None:
        if self._number_of(segment) != _LOOKED_AT:
            with contextlib.nullcontext() if self._has_seen_all else self._working:
                super()._forward(segment)
            return
        note = self._note_of(segment)
        if self.num_micro_batches:
            self.notes[note.key] = note
        else:
            self._unsettled.append(note)
        begin = self._working.begin()
        with self._working, counted(note.forward):
            super()._forward(segment)
        note.saved = kept(segment, self._own_memory | _given_memory(segment))
        values = [value for value in [*segment.inputs, *segment.outputs] if value.data is not None]
        note.saved_values = {_name_of(each) for each in values if storage_id(each.data) in note.saved}
        made = self._working.made(begin, note.saved)
        note.forward_working_bytes = note.working_bytes = max(0, self._working.peak(begin, self._own_memory) - made)

    def _backward(self, part: BackwardSegment, *, leaves_weights: bool) -> None:
        del leaves_weights  # nobody waits here
        number, key = self._number_of(part), self._key(part)
        can_wait = _is_run_once(part)
        note = self.notes.get(key)
        is_timed = number not in (_LOOKED_AT, self._split_micro_batch) or note is None
        self._was_split = is_timed and can_wait and number % 2 == 0
        if not (can_wait and number == self._split_micro_batch):
            self._run_weights_of(part.accumulates_into)
        if note is not None and number == _LOOKED_AT:
            self._profile(part, note, leaves_weights=can_wait and number == self._split_micro_batch)
        elif note is not None and number == self._split_micro_batch:
            most = self._run_watched(part, leaves_weights=can_wait, found=[])
            note.split_working_bytes, note.split_inner_working_bytes = most
        else:
            super()._backward(part, leaves_weights=self._was_split)
            if self._was_split:
                for earlier in [each for each in self.deferred if each is not part]:  # in the loop's order
                    self._run_weights(earlier)
                began_ns = _now_ns()
                self._run_weights(part)
                seconds = (_now_ns() - began_ns) / 1e9
                self.taken.append((part.backward.graph.index, place_of(part), "W", seconds))
        if number == self._split_micro_batch:
            self._num_to_come -= 1
            if not self._num_to_come:
                self._has_seen_all = True
                for earlier in list(self.deferred):  # now that nobody else needs what they hold
                    self._run_weights(earlier)

    def _run_weights_of(self, accumulated: Collection[object]) -> None:
        """Compute what earlier backwards have left for these parameters and modules, which are about to get more: sums
        are in the loop's order. The program splits nothing by itself, so that its order does not see to it.
        """
        parts = list(self.deferred)
        late = [number for number, part in enumerate(parts) if not part.accumulates_into.keys().isdisjoint(accumulated)]
        for part in parts[: late[-1] + 1] if late else []:
            self._run_weights(part)

    def _profile(self, part: BackwardSegment, note: SegmentNote, *, leaves_weights: bool) -> None:
        for edge in part.incoming:
            name, size = _key_name(edge.key), _span_bytes(self.gradients[edge])
            self.gradient_bytes[name] = max(size, self.gradient_bytes.get(name, 0))
        note.weight_flops += sum(call.entry.flops for call in part.calls if has_weights(call, self._trains))
        most, inner = self._run_watched(part, leaves_weights=leaves_weights, found=note.backward)
        note.working_bytes = max(note.working_bytes, most)
        note.inner_working_bytes = max(note.inner_working_bytes, inner)

    def _run_watched(self, part: BackwardSegment, *, leaves_weights: bool, found: list[Operation]) -> tuple[int, int]:
        """Run a backward; what it needs at most, on its own and in the middle of a stage. Its operations are `found`,
        without those by which it is handed what it begins with.
        """
        given = [item for item in map(self.gradients.get, part.incoming) if item is not None]
        values = [edge.key.data for edge in part.incoming if isinstance(edge.key, Value) and edge.key.data is not None]
        given_bytes, staying = sum(map(_span_bytes, given)), self._working.numbers([*given, *values])
        del given, values
        with self._working:
            if _is_run_once(part):
                hand_over(part, self.gradients)
            begin = self._working.begin()
            with counted(found):
                super()._backward(part, leaves_weights=leaves_weights)
        apart, passing = self._own_memory, self._own_gradients()
        most = self._working.peak(begin, apart, passing, staying)
        return given_bytes + most, given_bytes + self._working.peak(begin, apart, passing)

    def _run_weights(self, part: BackwardSegment) -> None:
        note = self.notes.get(self._key(part))
        if self._number_of(part) != self._split_micro_batch or note is None:
            super()._run_weights(part)
            return
        begin, known = self._working.begin(), len(note.weight)
        with self._working, counted(note.weight):
            super()._run_weights(part)
        note.left_bytes += self._working.given_back(begin)
        if self._split_micro_batch == _LOOKED_AT:
            note.split_working_bytes, note.split_inner_working_bytes = note.working_bytes, note.inner_working_bytes
            note.backward += note.weight[known:]
            most = self._working.peak(begin, self._own_memory, self._own_gradients())
            note.working_bytes += most
            note.inner_working_bytes += most

    def _own_gradients(self) -> set[int]:
        gradients = [raw_grad(item.tensor) for item in self.parameters.values() if item.is_parameter]
        return {storage_id(gradient) for gradient in gradients if gradient is not None}

    def _trace(self, kind: Any, action: Action, began_ns: int) -> None:
        now_ns = _now_ns()
        super()._trace(kind, action, began_ns)
        if kind == "wait":
            return
        if action.kind is Kind.BACKWARD and not self.is_dry:
            number = self._number_of(action.work)
            self._open_backwards[number] -= 1
            if not self._open_backwards[number]:
                del self._open_backwards[number]
                self._note_progress()
        took: Kinds = "B+W" if kind == "B" and self._was_split else kind
        self.taken.append((_graph_of(action).index, place_of(action.work), took, (now_ns - began_ns) / 1e9))
        self.has_run(len(self.taken), self._num_known)

    def _note_of(self, segment: Segment) -> SegmentNote:
        calls = segment.calls
        inputs = [self._input_of(value, segment) for value in segment.inputs if value.stage != EVERYWHERE]
        likeness = tuple(
            (_likeness_of(call.target), tuple(map(_shape, call.arguments or ())), tuple(map(str, call.entry.metas)))
            for call in calls
        )
        is_called = any(type(call.target) is Leaf for call in calls)
        return SegmentNote(
            key=self._key(segment),
            is_called=is_called,
            first_call=calls[0].index,
            inputs=inputs,
            likeness=repr(likeness),
        )

    def _input_of(self, value: Value, segment: Segment) -> Input:
        size = value.meta.size_bytes
        if value.call is None:
            name = value.name or str(value.key)
            return Input(source=None, stage=value.stage, size_bytes=size, name=name, is_parameter=bool(value.name))
        is_of_it = self.micro_batches.number_of(value.call.graph) == self._number_of(segment)
        return Input(
            source=self._key(value.call.segment) if is_of_it else None,
            stage=value.stage,
            size_bytes=size,
            name=_name_of(value),
            is_parameter=False,
        )


def needs_data(error: BaseException) -> PlanError:
    """Returns the error for what cannot be done without data."""
    return PlanError(
        "the step cannot be counted without data.",
        why=(f"{type(error).__name__}: {error}".splitlines() or [""])[0],
        hint="plan for devices of this machine's kind, without --roofline: the step is then measured here",
    )


def _now_ns() -> int:
    """Returns the time when all that was begun on the current stream has ended."""
    wait_for_current_stream()
    return time.perf_counter_ns()


def _graph_of(action: Action) -> MicroBatch:
    return action.work.graph if isinstance(action.work, Segment) else action.work.backward.graph


def _is_trained(action: Action) -> bool:
    """Returns whether the action is a backward, or a forward that one may follow."""
    return isinstance(action.work, BackwardSegment) or any(call.entry.requires_grad for call in action.work.calls)


def _is_run_once(part: BackwardSegment) -> bool:
    """Returns whether it is a whole backward of a segment, and the only one."""
    return part.segment is not None and not part.backward.retain_graph and part.backward.requested is None


def _name_of(value: Value) -> str:
    return ".".join(map(str, value.key))


def _given_memory(segment: Segment) -> set[int]:
    """Returns the memory of the program's own tensors, which it has made and holds."""
    items = [item for call in segment.calls for item in call.arguments or ()]
    return {storage_id(item) for item in items if isinstance(item, torch.Tensor)}


def _key_name(key: Value | str) -> str:
    return key if isinstance(key, str) else _name_of(key)


def _span_bytes(tensor: torch.Tensor | None) -> int:
    """Returns the bytes of a tensor with its strides: a part of something larger has gaps; 0 where there is none."""
    if tensor is None:
        return 0
    if not tensor.numel() or tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return span * tensor.element_size()


def _likeness_of(target: Target) -> Any:
    if type(target) is not Leaf:
        return getattr(target, "__name__", repr(target))
    placed: Iterable[Any] = target.placed
    return (repr(target.module), target.state_key(), tuple(str(item.meta) for item in placed))


def _shape(item: Any) -> str:
    return str(item.meta) if isinstance(item, Value) else f"{item.dtype}{tuple(item.shape)}"
