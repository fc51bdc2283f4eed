"""The notes of a profiler on some micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from farspan.profile.step import Operation

__all__ = ["Input", "Kinds", "Measured", "Sample", "SegmentNote"]

Kinds = Literal["F", "B", "B+W", "W"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A value that a segment takes from outside.

    Attributes:
        source: Level and stage of the segment that makes it; None for a parameter.
        stage: Where it comes from.
        size_bytes: Its size.
        name: The parameter's, or a name for the value.
        is_parameter: Whether it is one.
    """

    source: tuple[int, int] | None
    stage: int
    size_bytes: int
    name: str
    is_parameter: bool


@dataclass(slots=True, kw_only=True)
class SegmentNote:
    """A note on one segment of the profiled micro-batch."""

    key: tuple[int, int]
    """Level and stage."""
    is_called: bool
    """True if a module is called in it as a whole."""
    first_call: int
    """The place of its first call among all calls of the micro-batch."""
    inputs: list[Input]
    likeness: str
    """Equal for segments that do the same."""
    saved: dict[int, int] = field(default_factory=dict[int, int])
    """Bytes that its own backward needs, by id of the storage, which others may need too."""
    working_bytes: int = 0
    """Bytes that it needs besides, while it runs."""
    forward_working_bytes: int = 0
    """The same of its forward alone."""
    split_working_bytes: int = 0
    """The same of its backward without the gradients of weights."""
    inner_working_bytes: int = 0
    """Bytes that its backward needs where it is in the middle of a stage."""
    split_inner_working_bytes: int = 0
    """The same without the gradients of weights."""
    left_bytes: int = 0
    """Bytes that stay for the gradients of weights, if these are computed later."""
    weight_flops: float = 0.0
    saved_values: set[str] = field(default_factory=set[str])
    """Names of the inputs and outputs that its own backward needs."""
    forward: list[Operation] = field(default_factory=list[Operation])
    backward: list[Operation] = field(default_factory=list[Operation])
    weight: list[Operation] = field(default_factory=list[Operation])
    """The work of the backward that can be done later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The seconds of a task: "F", "B", "B+W" for the B of a split backward, "W" for its W.

    Attributes:
        number: Of the micro-batch; -1 for what belongs to none.
        key: Level and stage of the segment.
        kind: Of the task.
        seconds: What it took.
    """

    number: int
    key: tuple[int, int]
    kind: Kinds
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements of some micro-batches.

    Attributes:
        notes: Of the segments of the one that was profiled, by level and stage.
        samples: Of all.
        num_micro_batches: Those of which a backward has run; they have numbers from 0, and the first was profiled.
        split_micro_batch: The one that was profiled for what its backwards leave for the gradients of weights; -1 for
            none.
        gradient_bytes: What the gradient of a value or parameter takes where it arrives, by name.
        is_dry: Whether nothing was computed.
    """

    notes: Mapping[tuple[int, int], SegmentNote]
    samples: Sequence[Sample]
    num_micro_batches: int
    split_micro_batch: int
    gradient_bytes: Mapping[str, int]
    is_dry: bool = False
