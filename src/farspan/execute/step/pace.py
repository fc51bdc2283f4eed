"""Compares what this rank's tasks take with what the same tasks took before, under the same plan.

    step                 1    2    3    4    5    6    7    8    9
    forward of a block   30   12   10   11   10   25   10   10   23 ms      usually 10: now 2.3 times as long
                        (warming up)   (usual: the median)

Only computing counts: what a task takes from its begin to its end, not the waiting before it. Tasks are the same where
they run the same calls on data of the same shapes in the same modes; those that have not been seen often enough are not
compared. So first steps, other shapes and evaluation make no rank look slow.

On a GPU a task takes from one event on the stream to another, behind what the stream waits for before it; the events
are read in a later step, when the device has come so far. They cost some microseconds, so one step in eight has them.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch

from farspan.devices import is_accelerator
from farspan.execute.exchange import PaceNote
from farspan.execute.step.step_record import Trace
from farspan.graph import Graph, MicroBatch, Segment
from farspan.program.program import Program

__all__ = ["DeviceClock", "Pace"]

_NUM_WARM = 2
"""First steps under a plan, of which nothing is taken."""
_NUM_USUAL = 5
"""Steps of which the median is what a task usually takes."""
_EVERY = 8
"""Steps of which one is timed on a GPU, where they are short."""
_LONG_S = 0.2
"""Longer ones are all timed."""
_MOST_PROGRAMS, _MOST_KINDS, _MOST_PENDING = 16, 1 << 10, 4

_Key = tuple[int, str, bool, int]
"""Kind of the graph, kind of the task, whether it defers weight gradients, number of the segment."""


_Marks = tuple[Any, Any] | None
"""Events before and behind a task; None for one that the host ran itself."""


class DeviceClock:
    """Marks on the streams of GPUs where tasks begin and end."""

    def __init__(self) -> None:
        self._free: dict[int, list[Any]] = {}
        """Events that are not in use, by number of the device, to which each belongs."""
        self._taken: list[_Marks] = []
        self._index = -1
        self._begun: Any = None

    def begin(self, device: torch.device) -> None:
        """A task begins, on the current stream of `device`."""
        self._begun = None
        if is_accelerator(device):
            self._index = torch.accelerator.current_device_index()
            self._begun = self._mark()

    def end(self) -> None:
        """The task that has begun has run."""
        self._taken.append(None if self._begun is None else (self._begun, self._mark()))

    def _mark(self) -> Any:
        free = self._free.setdefault(self._index, [])
        event = free.pop() if free else torch.Event(enable_timing=True)
        event.record()
        return event, self._index

    def take(self) -> list[_Marks]:
        """Returns the marks of the tasks that have run, in their order."""
        taken, self._taken = self._taken, []
        return taken

    def seconds(self, marks: Sequence[_Marks]) -> list[float | None] | None:
        """Returns what tasks took, None for one without marks; None for all as long as devices have not come so far."""
        pairs = [pair for pair in marks if pair is not None]
        if not all(end[0].query() for _, end in pairs):
            return None
        found = [None if pair is None else pair[0][0].elapsed_time(pair[1][0]) / 1e3 for pair in marks]
        self.release(marks)
        return found

    def release(self, marks: Sequence[_Marks]) -> None:
        """Nobody will read these."""
        for event, index in [mark for pair in marks if pair is not None for mark in pair]:
            self._free[index].append(event)


class Pace:
    """The pace of one rank.

    Attributes:
        on_steps: Called with the notes of all ranks, by rank, on training steps that are over; None where nobody wants
            to know. The same on every rank, and so are the notes.
        disturbances: Each says whether this rank does something beside the step that slows it down for a while.
    """

    def __init__(self) -> None:
        self.on_steps: Callable[[Sequence[Sequence[PaceNote]]], None] | None = None
        self._every_s = 0.0
        self._noted: list[Sequence[PaceNote]] = []
        """The notes of all ranks on steps that `on_steps` has not been called with."""
        self._noted_s = 0.0
        self.disturbances: list[Callable[[], bool]] = []
        self._num_steps = 0
        self._clock = DeviceClock()
        self._has_gpu = False
        """Whether a task of this rank has run on a GPU."""
        self._times = 1
        """For how many steps the one stands that runs, where it is timed on a GPU."""
        self._span_s = 0.0
        self._pending: deque[tuple[Sequence[_Key], list[float], list[_Marks], int]] = deque()
        """Of steps that GPUs may not have ended: tasks, what they took of the host, marks, for how many each stands."""
        self._usual: dict[_Key, float] = {}
        self._samples: dict[_Key, list[float]] = {}
        self._kinds: dict[object, int] = {}
        self._keys: OrderedDict[int, tuple[object, list[_Key]]] = OrderedDict()
        """By identity of what programs of steps that look alike have in common, with that."""

    def begin(self, on_steps: Callable[[Sequence[Sequence[PaceNote]]], None] | None, *, every_s: float = 0.0) -> None:
        """Forget what tasks took: the plan is another one, or what they take now is to be the usual.

        Args:
            on_steps: See the attribute.
            every_s: For how many seconds of steps it is called once.
        """
        self.on_steps, self._every_s = on_steps, every_s
        self._noted, self._noted_s = [], 0.0
        self._num_steps = 0
        for _, _, marks, _ in self._pending:
            self._clock.release(marks)
        self._pending.clear()
        self._forget()

    def _forget(self) -> None:
        self._usual.clear()
        self._samples.clear()
        self._kinds.clear()
        self._keys.clear()

    def add(self, notes: Sequence[PaceNote]) -> None:
        """A training step is over.

        Args:
            notes: Of all ranks, by rank.
        """
        self._noted.append(notes)
        self._noted_s += max([note.span_s for note in notes])
        if self.on_steps is not None and self._noted_s >= self._every_s:
            noted, self._noted, self._noted_s = self._noted, [], 0.0
            self.on_steps(noted)

    def begin_step(self) -> DeviceClock | None:
        """Returns the clock for a training step that is about to run; None where devices need none."""
        has_gpu = self.on_steps is not None and torch.accelerator.is_available()
        self._clock.release(self._clock.take())  # of a step that was not noted
        self._times = 1 if self._span_s > _LONG_S else _EVERY
        return self._clock if has_gpu and self._num_steps % self._times == 0 else None

    def note(self, graphs: Sequence[Graph], program: Program, traces: Sequence[Trace]) -> PaceNote:
        """Returns what there is to say of a training step that this rank has run.

        Args:
            graphs: Of the step.
            program: Of this rank.
            traces: What it took.
        """
        if self.on_steps is None:
            return PaceNote()
        self._num_steps += 1
        if not traces:
            return PaceNote()
        span_s = self._span_s = (traces[-1].end_ns - traces[0].start_ns) / 1e9
        marks = self._clock.take()
        self._has_gpu = self._has_gpu or any(pair is not None for pair in marks)
        is_disturbed = any(is_there() for is_there in self.disturbances)
        if is_disturbed or self._num_steps <= _NUM_WARM:
            self._clock.release(marks)
            return PaceNote(usual_s=-1.0 if is_disturbed else 0.0, span_s=span_s)
        ran = [each for each in traces if each.kind != "wait"]
        keys = self._keys_of(graphs, program)
        if program.has_several_workers:
            keys = _in_order(keys, program, ran)
        compared_s = usual_s = 0.0
        for one_keys, seconds, times in self._finished(keys, ran, marks):
            one_compared_s, one_usual_s = self._compared(one_keys, seconds)
            compared_s += times * one_compared_s
            usual_s += times * one_usual_s
        return PaceNote(compared_s=compared_s, usual_s=usual_s, span_s=span_s)

    def _finished(
        self, keys: Sequence[_Key], ran: Sequence[Trace], marks: list[_Marks]
    ) -> Iterator[tuple[Sequence[_Key], Sequence[float], int]]:
        """Yields what the tasks of a step took, once that is known, and for how many steps it stands."""
        of_host = [(each.end_ns - each.start_ns - each.waited_ns) / 1e9 for each in ran]
        if not self._has_gpu:
            yield keys, of_host, 1
            return
        if marks:
            self._pending.append((keys, of_host, marks, self._times))
        while self._pending and (taken := self._clock.seconds(self._pending[0][2])) is not None:
            its_keys, its_host, _, times = self._pending.popleft()
            yield its_keys, [b if a is None else a for a, b in zip(taken, its_host, strict=True)], times
        if len(self._pending) > _MOST_PENDING:
            self._clock.release(self._pending.popleft()[2])

    def _compared(self, keys: Sequence[_Key], seconds: Sequence[float]) -> tuple[float, float]:
        """Returns what those tasks of a step took of which the usual is known, and the usual; learns of the others."""
        compared_s = usual_s = 0.0
        new: defaultdict[_Key, list[float]] = defaultdict(list)
        for key, taken_s in zip(keys, seconds, strict=False):
            usual = self._usual.get(key)
            if usual is None:
                new[key].append(taken_s)
            else:
                compared_s += taken_s
                usual_s += usual
        for key, taken in new.items():
            samples = self._samples.setdefault(key, [])
            samples.append(sum(taken) / len(taken))
            if len(samples) == _NUM_USUAL:
                self._usual[key] = median(self._samples.pop(key))
        return compared_s, usual_s

    def _keys_of(self, graphs: Sequence[Graph], program: Program) -> list[_Key]:
        known = self._keys.get(id(program.likeness))
        if known is None:
            if len(self._kinds) > _MOST_KINDS:
                self._forget()
            kinds: dict[MicroBatch, int] = {graph: self._kind_of(graph) for graph in graphs}
            keys: list[_Key] = []
            for action in program.actions:
                work = action.work
                graph = work.graph if isinstance(work, Segment) else work.backward.graph
                segment = work if isinstance(work, Segment) else work.segment
                number = -1 if segment is None else segment.index
                keys.append((kinds.get(graph, -1), action.kind.value, action.leaves_weights, number))
            known = self._keys[id(program.likeness)] = (program.likeness, keys)
            if len(self._keys) > _MOST_PROGRAMS:
                self._keys.popitem(last=False)
        return known[1]

    def _kind_of(self, graph: Graph) -> int:
        """Returns a number that graphs have in common whose calls do the same, at the same stages."""
        calls = tuple([(entry.digest, stage) for _, entry, stage, *_ in graph.record])
        return self._kinds.setdefault(calls, len(self._kinds))


def _in_order(keys: Sequence[_Key], program: Program, ran: Sequence[Trace]) -> list[_Key]:
    """Returns the keys of the tasks in the order in which they ran. Each worker has run its own in their order."""
    own: dict[int, list[_Key]] = {}
    for key, action in zip(keys, program.actions, strict=True):
        own.setdefault(action.queue, []).append(key)
    left = {queue: iter(its) for queue, its in own.items()}
    return [next(left[each.queue]) for each in ran]
