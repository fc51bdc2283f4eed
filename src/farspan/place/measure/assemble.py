"""Assembles the profile of a step from a profiler's notes: segments become units, what they pass on becomes values."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from farspan.call.leaf import Placed
from farspan.place.measure.measurements import Measured, SegmentNote
from farspan.profile.step import Operation, PassedValue, StepProfile, UnitProfile

__all__ = ["assemble", "memory_of"]


@dataclass(slots=True)
class _Sums:
    """The sums of one unit."""

    keys: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    first_calls: list[int] = field(default_factory=list[int])
    likeness: list[str] = field(default_factory=list[str])
    forward_work: list[Operation] = field(default_factory=list[Operation])
    backward_work: list[Operation] = field(default_factory=list[Operation])
    weight_work: list[Operation] = field(default_factory=list[Operation])
    weight_flops: float = 0.0
    saved: dict[int, int] = field(default_factory=dict[int, int])
    working_bytes: float = 0.0
    forward_working_bytes: float = 0.0
    split_working_bytes: float = 0.0
    inner_working_bytes: float = 0.0
    split_inner_working_bytes: float = 0.0
    left_bytes: float = 0.0
    inputs: dict[str, float] = field(default_factory=dict[str, float])
    is_called: bool = False

    def add(self, key: tuple[int, int], note: SegmentNote) -> None:
        """Adds the note on a segment of the unit, which has level and stage `key`."""
        self.keys.append(key)
        self.first_calls.append(note.first_call)
        self.likeness.append(note.likeness)
        self.forward_work += note.forward
        self.backward_work += note.backward
        self.weight_work += note.weight
        self.weight_flops += note.weight_flops
        self.saved.update(note.saved)
        self.working_bytes = max(self.working_bytes, note.working_bytes)
        self.forward_working_bytes = max(self.forward_working_bytes, note.forward_working_bytes)
        self.split_working_bytes = max(self.split_working_bytes, note.split_working_bytes)
        self.inner_working_bytes = max(self.inner_working_bytes, note.inner_working_bytes)
        self.split_inner_working_bytes = max(self.split_inner_working_bytes, note.split_inner_working_bytes)
        self.left_bytes += note.left_bytes
        self.is_called |= note.is_called

    def alike(self) -> str:
        """Returns a text that is equal for units that do the same work; "" for one that does none."""
        return repr((self.likeness, [item.flops for item in self.backward_work if item.flops])) if self.keys else ""

    def profile(
        self, name: str, kept: tuple[float, float], seconds: Mapping[str, float | None], shared: Mapping[int, str]
    ) -> UnitProfile:
        """Returns the unit's profile, but for its likeness.

        Args:
            name: Of the unit.
            kept: Bytes of what is trained there, and of all that lies there.
            seconds: By kind of task.
            shared: By storage that several units save, the name that they share.
        """
        saved_bytes = float(sum(self.saved.values()))
        return UnitProfile(
            name=name,
            forward_s=seconds["F"],
            backward_s=seconds["B"],
            weight_s=seconds["W"] if self.weight_work else 0.0,
            forward_work=tuple(self.forward_work),
            backward_work=tuple(self.backward_work),
            weight_work=tuple(self.weight_work),
            weight_flops=self.weight_flops,
            saved_bytes=saved_bytes,
            saved_with_others=tuple(
                (shared[storage], float(size)) for storage, size in self.saved.items() if storage in shared
            ),
            working_bytes=self.working_bytes,
            forward_working_bytes=self.forward_working_bytes,
            split_working_bytes=self.split_working_bytes,
            released_bytes=self.working_bytes - self.inner_working_bytes,
            split_released_bytes=self.split_working_bytes - self.split_inner_working_bytes,
            left_bytes=self.left_bytes,
            input_bytes=min(sum(self.inputs.values()), saved_bytes),
            trained_bytes=kept[0],
            memory_bytes=kept[1],
            can_remat=self.is_called and name != "",
            first_call=min(self.first_calls, default=None),
        )


def assemble(
    measured: Measured,
    names: Sequence[str],
    *,
    parameters: Mapping[str, Placed],
    states: Mapping[int, float],
    device: str,
    num_micro_batches: int,
    notes: Sequence[str],
) -> StepProfile:
    """Returns the profile of a step of which each unit was a stage.

    Args:
        measured: The step.
        names: Of the units, by stage.
        parameters: All that is placed.
        states: Bytes of optimizer state, by id of the parameter.
        device: The kind of it.
        num_micro_batches: Of a step.
        notes: What a reader should know.
    """
    unit_of = _units_of(measured.notes)
    values = _values_of(measured, unit_of)
    sums = [_Sums() for _ in names]
    for key, note in measured.notes.items():
        sums[unit_of[key]].add(key, note)
    for value in values:
        sums[value.target].inputs[value.name] = value.size_bytes
    alike = [own.alike() for own in sums]
    seconds, spread = _seconds(measured, unit_of)
    mean_s = _means_of_like_units(seconds, alike, is_dry=measured.is_dry)
    uses = Counter(storage for own in sums for storage in own.saved)
    shared = {storage: str(number) for number, storage in enumerate(uses) if uses[storage] > 1}
    numbers = {likeness: str(number) for number, likeness in enumerate(dict.fromkeys(alike))}
    profiles = [
        replace(
            own.profile(name, memory_of(parameters, stage, states), mean_s[stage], shared),
            likeness=numbers[alike[stage]] if own.keys else "",
        )
        for stage, (name, own) in enumerate(zip(names, sums, strict=True))
    ]
    return StepProfile(
        units=tuple(profiles),
        values=tuple(values),
        num_micro_batches=num_micro_batches,
        device=device,
        spread=spread,
        notes=tuple(notes),
    )


def _values_of(measured: Measured, unit_of: Mapping[tuple[int, int], int]) -> list[PassedValue]:
    """Returns the values that one unit makes, or holds, and another uses."""
    values: dict[tuple[int, int, str], PassedValue] = {}
    for key, note in measured.notes.items():
        at = unit_of[key]
        for item in note.inputs:
            source = item.stage if item.source is None else unit_of.get(item.source, item.stage)
            if source != at:
                values[source, at, item.name] = PassedValue(
                    source=source,
                    target=at,
                    size_bytes=item.size_bytes,
                    name=item.name,
                    is_saved=item.source is None or item.name in measured.notes[item.source].saved_values,
                    is_saved_there=item.name in note.saved_values,
                    gradient_bytes=measured.gradient_bytes.get(item.name, 0),
                    is_parameter=item.is_parameter,
                )
    return list(values.values())


def _means_of_like_units(
    seconds: Mapping[tuple[int, str], float], alike: Sequence[str], *, is_dry: bool
) -> list[dict[str, float | None]]:
    """Returns for each unit the seconds of a task by its kind: the mean over units that do the same work."""
    by_likeness: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (stage, kind), taken in seconds.items():
        by_likeness[alike[stage], kind].append(taken)

    def mean_s(stage: int, kind: str) -> float | None:
        if is_dry:
            return None
        return fmean(by_likeness[alike[stage], kind]) if (stage, kind) in seconds else 0.0

    return [{kind: mean_s(stage, kind) for kind in "FBW"} for stage in range(len(alike))]


def _units_of(notes: Mapping[tuple[int, int], SegmentNote]) -> dict[tuple[int, int], int]:
    """Maps each segment to its unit: its own stage, but an operation of the program between two modules that comes back
    to an earlier stage goes with what it waits for. So it closes no circle, and can stay where the pipeline ends.
    """
    unit_of: dict[tuple[int, int], int] = {}
    seen: set[int] = set()
    for key in sorted(notes):
        note, stage = notes[key], key[1]
        sources = [item.source for item in note.inputs if item.source in unit_of]
        if note.is_called or stage not in seen or not sources:
            unit_of[key] = stage
            seen.add(stage)
        else:
            unit_of[key] = unit_of[max(source for source in sources if source is not None)]
    return unit_of


def _seconds(measured: Measured, unit_of: Mapping[tuple[int, int], int]) -> tuple[dict[tuple[int, str], float], float]:
    """Returns seconds of a micro-batch by unit and kind of task, and how much they differ."""
    taken: dict[tuple[int, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    whole: dict[int, float] = defaultdict(float)
    timed = [sample for sample in measured.samples if 0 <= sample.number < measured.num_micro_batches]
    for looked_at in (0, measured.split_micro_batch):  # these took longer
        others = [sample for sample in timed if sample.number != looked_at]
        timed = others or timed
    for sample in timed:
        stage = unit_of.get(sample.key, sample.key[1])
        taken[stage, sample.kind][sample.number] += sample.seconds
        if sample.kind != "W":
            whole[sample.number] += sample.seconds
    for stage, kind in list(taken):
        if kind == "B+W":  # what it costs to split is left out where it can be
            taken.setdefault((stage, "B"), taken[stage, kind])
    middle = median(whole.values()) if whole else 0.0
    spread = median(abs(each - middle) for each in whole.values()) / middle if middle else 0.0
    return {key: median(each.values()) for key, each in taken.items()}, spread


def memory_of(parameters: Mapping[str, Placed], stage: int, states: Mapping[int, float]) -> tuple[float, float]:
    """Returns bytes of what is trained at a stage, and of all that lies there.

    A copy of the model, such as an average of its weights, lies there and is trained only if an optimizer has it.

    Args:
        parameters: All that is placed.
        stage: Which.
        states: Bytes of optimizer state, by id of each parameter that an optimizer has.
    """
    trained = memory = 0.0
    for item in parameters.values():
        if item.stage != stage:
            continue
        size = float(item.meta.size_bytes)
        memory += size
        if item.is_trained and not (item.is_copy and id(item.tensor) not in states):
            trained += size
            memory += size + states.get(id(item.tensor), 0.0)
    return trained, memory
