"""A training step in numbers: what each part of the model that is placed as a whole takes and keeps. Knows no torch.

unit          forward, backward, saved, ...            value        from -> to, bytes
embedding     ..                                       x            embedding -> blocks.0
blocks.0      ..  \\ alike: the mean of both            blocks.0's   blocks.0 -> blocks.1
blocks.1      ..  /
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["UnitProfile", "Operation", "PassedValue", "StepProfile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation on a device.

    Attributes:
        flops: Floating-point operations of its products.
        moved_bytes: What it reads and writes.
        dtype: What it computes with ("float32").
    """

    flops: float
    moved_bytes: float
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedValue:
    """A value that one unit makes, or holds, and another uses in every micro-batch.

    Attributes:
        source: Index of the unit it comes from.
        target: Index of the one that uses it.
        size_bytes: Its size.
        name: Equal for all uses of one value.
        is_saved: Whether the one that makes it keeps it for its own backward.
        is_saved_there: The same of the one that uses it.
        gradient_bytes: What its gradient takes, with gaps where it is a part of something larger; 0 if it has none.
        is_parameter: Whether it is a parameter, which is the same in all micro-batches.
    """

    source: int
    target: int
    size_bytes: float
    name: str
    is_saved: bool = False
    is_saved_there: bool = False
    gradient_bytes: float = 0.0
    is_parameter: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitProfile:
    """A module (or a parameter) that is placed as a whole, with the operations of the program that go with it.

    Attributes:
        name: Its name in the model.
        forward_s: Measured seconds for one micro-batch; None where they have not been measured.
        backward_s: The same of the backward.
        forward_work: The operations of one forward.
        backward_work: Those of its backward.
        weight_s: How much of backward_s is gradients of weights that can be computed later.
        weight_work: The same of backward_work.
        weight_flops: Of the forward of what has weights.
        saved_bytes: What stays of a micro-batch between forward and backward.
        saved_with_others: What of that other units keep too: a name that they share, and the size.
        working_bytes: What it needs besides, while it runs, at most.
        forward_working_bytes: The same of its forward alone.
        split_working_bytes: The same of its backward without the gradients of weights.
        released_bytes: How much less than working_bytes its backward needs where what it begins with is made at the
            same stage: autograd releases that as soon as it was used.
        split_released_bytes: The same of split_working_bytes.
        left_bytes: What stays between the backward and the gradients of weights, where these are computed later.
        input_bytes: How much of saved_bytes comes from outside, and would stay if the rest were computed again.
        trained_bytes: Of its parameters that get a gradient.
        memory_bytes: Parameters, gradients, optimizer state, buffers.
        likeness: Equal for units that do the same work: repeated blocks.
        can_remat: Whether it is a module that is called, whose activations can be computed again.
        first_call: The place of the first of its calls among all of a micro-batch; None where it is not used.
    """

    name: str
    forward_s: float | None = None
    backward_s: float | None = None
    forward_work: tuple[Operation, ...] = ()
    backward_work: tuple[Operation, ...] = ()
    weight_s: float | None = None
    weight_work: tuple[Operation, ...] = ()
    weight_flops: float = 0.0
    saved_bytes: float = 0.0
    saved_with_others: tuple[tuple[str, float], ...] = ()
    working_bytes: float = 0.0
    forward_working_bytes: float = 0.0
    split_working_bytes: float = 0.0
    released_bytes: float = 0.0
    split_released_bytes: float = 0.0
    left_bytes: float = 0.0
    input_bytes: float = 0.0
    trained_bytes: float = 0.0
    memory_bytes: float = 0.0
    likeness: str = ""
    can_remat: bool = False
    first_call: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """The costs of a step of one training loop, unit by unit.

    Attributes:
        units: In the order of the model's modules; together they hold every parameter.
        values: What flows between them.
        num_micro_batches: Of a step, as the loop has it.
        device: Kind of the device of the measured seconds.
        spread: By how much the seconds of a whole micro-batch differed from one to the next, as a share of them.
        notes: What a reader should know.
    """

    units: tuple[UnitProfile, ...]
    values: tuple[PassedValue, ...]
    num_micro_batches: int
    device: str
    spread: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def num_unique(self) -> int:
        """Returns how many kinds of units there are."""
        return len({unit.likeness or unit.name for unit in self.units})
