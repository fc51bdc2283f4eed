"""What calls produce and consume: a value, known by its metadata on every rank, by its data on its owner alone."""

from __future__ import annotations

import functools
import hashlib
import itertools
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import weakref

    from farspan.graph.graph import Call, Segment

__all__ = ["EVERYWHERE", "Meta", "Value"]

EVERYWHERE = -1
"""In the place of a stage: of a source that every rank has, for it lies outside the model."""

_OF_CALL, _OF_PARAMETER, _OF_INPUT = range(3)
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Meta:
    """What every rank knows of a tensor without having it. `dtype` and `device` are torch's own objects."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    device: Any
    requires_grad: bool
    is_parameter: bool = False
    """A leaf of autograd, which must not be written in place where gradients are recorded."""

    numel: int = field(init=False, compare=False, default=0)
    number: int = field(init=False, compare=False, repr=False, default=0)
    """Of this object, in this process: unlike its `id`, no other ever gets it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", prod(self.shape))
        object.__setattr__(self, "number", next(_numbers))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Value:
    """One tensor of the recorded program.

    A value is produced by a call, or it is a *source*: something its stage holds before the step begins (a
    parameter used outside its own module, a gradient, an input that one rank has read, a value of an earlier step), or
    EVERYWHERE: a plain tensor that gradient flows to.
    """

    __slots__ = (
        "__weakref__",
        "call",
        "data",
        "gradient_of",
        "index",
        "is_kept",
        "is_weight",
        "lazy",
        "meta",
        "name",
        "num_readers",
        "num_users",
        "segment",
        "stage",
        "state_of",
        "ticket",
    )

    def __init__(self, meta: Meta, stage: int, *, call: Call | None = None, index: int = 0, name: str = "") -> None:
        self.meta = meta
        self.stage = stage
        self.call = call
        """The producer; None for a source."""
        self.index = index
        """Which of the producer's outputs; for a source that is an input, its number among all inputs, from 1."""
        self.segment: Segment | None = None if call is None else call.segment
        self.name = name
        """The parameter's name, for a source that is a parameter; "" otherwise."""
        self.is_weight: bool | None = None
        """Whether it is a parameter or made of parameters alone; None until somebody asks."""
        self.gradient_of = ""
        """The parameter's name, for a source that is its gradient, and for what has been written into one since."""
        self.state_of: tuple[int, str, int] | None = None
        """For a source that an optimizer keeps: the optimizer, what for, its place among the tensors kept for it."""
        self.data: Any = None
        """The real tensor, on the rank that has it."""
        self.lazy: weakref.ref[Any] | None = None
        """The user's handle; dead when the user's program can no longer read this value."""
        self.is_kept = False
        """Whether slower ranks may still read it, which are at a point of the program where it was held."""
        self.num_users = 0
        """At run time, for a value received from another rank: how many segments here have yet to use it."""
        self.num_readers = 0
        """At run time: how many segments and messages of this rank have yet to take it."""
        self.ticket: Any = None
        """Where a small value of another rank will arrive without being asked for."""

    @property
    def pending(self) -> bool:
        """Whether the value has yet to be computed."""
        return self.segment is not None and not self.segment.executed

    @property
    def is_gradient(self) -> bool:
        """Whether it is a source that is a parameter's gradient."""
        return bool(self.gradient_of) and self.call is None

    @property
    def key(self) -> tuple[int, int, int]:
        """The value's name between ranks."""
        return (-1, -1, self.index) if self.call is None else (self.call.graph.index, self.call.index, self.index)

    @property
    def identity(self) -> tuple[int, ...]:
        """For a source: what it is, the same numbers on every rank."""
        if self.call is not None:
            return (_OF_CALL, *self.key)
        if self.name or self.gradient_of:
            return (_OF_PARAMETER, _number_of(self.name), _number_of(self.gradient_of))
        return (_OF_INPUT, self.index, self.stage)

    @property
    def is_readable(self) -> bool:
        """Whether the user's program still holds the value, or all ranks are still to learn it."""
        return self.ticket is not None or (self.lazy is not None and self.lazy() is not None)

    @property
    def is_held(self) -> bool:
        """Whether its data are needed for more than the step: by this rank's program, or by that of a slower rank."""
        return self.is_kept or self.is_readable

    def describe(self) -> str:
        if self.name:
            return f"parameter {self.name}"
        if self.gradient_of:
            return f"gradient of {self.gradient_of}"
        if self.stage == EVERYWHERE:
            return f"{self.meta}, a tensor outside the model"
        producer = "a batch that one rank has read" if self.call is None else self.call.describe()
        return f"{self.meta} from {producer}"


@functools.cache
def _number_of(name: str) -> int:
    """A number for the name of a parameter, equal in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
