"""Assembles the profile of a step from a profiler's notes: segments become units, what they pass on becomes values."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    sums = [_Sums() for _ in names]
    values: dict[tuple[int, int, str], PassedValue] = {}
    for key, note in measured.notes.items():
        at = unit_of[key]
        own = sums[at]
        own.keys.append(key)
        own.first_calls.append(note.first_call)
        own.likeness.append(note.likeness)
        own.forward_work += note.forward
        own.backward_work += note.backward
        own.weight_work += note.weight
        own.weight_flops += note.weight_flops
        own.saved.update(note.saved)
        own.working_bytes = max(own.working_bytes, note.working_bytes)
        own.forward_working_bytes = max(own.forward_working_bytes, note.forward_working_bytes)
        own.split_working_bytes = max(own.split_working_bytes, note.split_working_bytes)
        own.inner_working_bytes = max(own.inner_working_bytes, note.inner_working_bytes)
        own.split_inner_working_bytes = max(own.split_inner_working_bytes, note.split_inner_working_bytes)
        own.left_bytes += note.left_bytes
        own.is_called |= note.is_called
        for item in note.inputs:
            source = item.stage if item.source is None else unit_of.get(item.source, item.stage)
            if source == at:
                continue
            own.inputs[item.name] = item.size_bytes
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
    seconds, spread = _seconds(measured, unit_of)
    kept = [memory_of(parameters, stage, states) for stage in range(len(names))]
    alike = [
        repr((own.likeness, [item.flops for item in own.backward_work if item.flops])) if own.keys else ""
        for own in sums
    ]
    by_likeness: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (stage, kind), taken in seconds.items():
        by_likeness[alike[stage], kind].append(taken)
    uses = Counter(storage for own in sums for storage in own.saved)
    shared = {storage: str(number) for number, storage in enumerate(uses) if uses[storage] > 1}
    numbers = {likeness: str(number) for number, likeness in enumerate(dict.fromkeys(alike))}

    def seconds_of(stage: int, kind: str) -> float | None:
        if measured.is_dry:
            return None
        return fmean(by_likeness[alike[stage], kind]) if (stage, kind) in seconds else 0.0

    profiles = [
        UnitProfile(
            name=name,
            forward_s=seconds_of(stage, "F"),
            backward_s=seconds_of(stage, "B"),
            weight_s=seconds_of(stage, "W") if own.weight_work else 0.0,
            forward_work=tuple(own.forward_work),
            backward_work=tuple(own.backward_work),
            weight_work=tuple(own.weight_work),
            weight_flops=own.weight_flops,
            saved_bytes=float(sum(own.saved.values())),
            saved_with_others=tuple(
                (shared[storage], float(size)) for storage, size in own.saved.items() if storage in shared
            ),
            working_bytes=own.working_bytes,
            forward_working_bytes=own.forward_working_bytes,
            split_working_bytes=own.split_working_bytes,
            released_bytes=own.working_bytes - own.inner_working_bytes,
            split_released_bytes=own.split_working_bytes - own.split_inner_working_bytes,
            left_bytes=own.left_bytes,
            input_bytes=min(sum(own.inputs.values()), float(sum(own.saved.values()))),
            trained_bytes=kept[stage][0],
            memory_bytes=kept[stage][1],
            likeness=numbers[alike[stage]] if own.keys else "",
            can_remat=own.is_called and name != "",
            first_call=min(own.first_calls, default=None),
        )
        for stage, (name, own) in enumerate(zip(names, sums, strict=True))
    ]
    return StepProfile(
        units=tuple(profiles),
        values=tuple(values.values()),
        num_micro_batches=num_micro_batches,
        device=device,
        spread=spread,
        notes=tuple(notes),
    )


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
    """Returns bytes of what is trained at a stage, and of all that lies there."""
    trained = memory = 0.0
    for item in parameters.values():
        if item.stage != stage:
            continue
        size = float(item.meta.numel * item.meta.dtype.itemsize)
        memory += size
        if item.is_parameter and item.tensor.requires_grad:
            trained += size
            memory += size + states.get(id(item.tensor), 0.0)
    return trained, memory
