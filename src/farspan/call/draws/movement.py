"""Measures how far a call moves torch's CPU generator, once for each operation that draws and its shapes.

How many numbers an operation draws is a matter of its shapes, its dtypes and the machine: dropout draws two numbers an
element with torch's own kernels, and one in all with Intel's, of which the rest follows. So it is not computed: the
operation runs once on a tensor of that shape, and the states before and after are compared.

    rand(4, 64)     256, always
    randn(3)        0 cached -> 8, 1 cached        torch keeps the second of two normal numbers for the next time:
                    1 cached -> 4, 0 cached        such a call is repeated by whoever wants the state after it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from farspan.call.draws.generators import GENERATORS
from farspan.call.draws.mersenne import cached_normals, distance, keeps_the_same, with_cached_normals
from farspan.torch_private import without_any_mode

__all__ = ["BY_SHAPE", "Draws", "Moves", "Operation", "keep_operation", "repeated"]

BY_SHAPE = frozenset(
    [
        "bernoulli", "bernoulli_", "cauchy", "cauchy_", "exponential", "exponential_", "geometric", "geometric_",
        "log_normal", "log_normal_", "multinomial", "native_dropout", "normal", "normal_", "normal_functional", "rand",
        "rand_like", "randint", "randint_like", "randn", "randn_like", "random", "random_", "randperm", "uniform",
        "uniform_",
    ]
)  # fmt: skip
"""Operations of torch that draw as many numbers for any data of the same shape. Others may go on drawing until a number
suits them (`_standard_gamma`), or draw for some elements only (`rrelu`).
"""

Operation = tuple[str, Any, tuple[Any, ...]]
"""An operation that draws: its name, the template of its arguments, and what to know of the tensors among them."""
_operations: dict[str, Any] = {}
_known: dict[tuple[Operation, int], Any] = {}
_MOST_KNOWN = 256


@dataclass(frozen=True, slots=True)
class Moves:
    """The distance by which a call moves the generator, from a state that keeps certain normal numbers."""

    count: int
    """The distance in draws of 32 bits."""
    cached: int
    """The normal numbers that are kept afterwards, as in `cached_normals`."""
    repeats: tuple[tuple[int, Operation, int], ...] = ()
    """Operations that use or make the normal numbers kept, and how many draws come before and up to their end."""


class Draws:
    """The draws of a call from torch's CPU generator, in order."""

    __slots__ = ("_moves", "has_own", "operations", "verified")

    def __init__(self, operations: Sequence[Operation], *, has_own: bool = False) -> None:
        self.operations = tuple(operations)
        self.has_own = has_own
        """True if it also draws from a generator that the user made."""
        self.verified: set[int] = set()
        """The kinds of states from which a run has been seen to move the generator just as far as foreseen."""
        self._moves: dict[int, Moves | None] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Draws) and other.operations == self.operations

    __hash__ = None  # type: ignore[assignment]

    def moves(self, cached: int) -> Moves | None:
        """Returns how far the draws move a state that keeps the normal numbers `cached`; None where that depends on
        data."""
        if cached not in self._moves:
            self._moves[cached] = self._measured(cached)
        return self._moves[cached]

    def _measured(self, cached: int) -> Moves | None:
        count = 0
        repeats: list[tuple[int, Operation, int]] = []
        for operation in self.operations:
            found = _movement(operation, cached)
            if found is None:
                return None
            number, cached, is_repeated = found
            if is_repeated:
                repeats.append((count, operation, count + number))
            count += number
        return Moves(count, cached, tuple(repeats))


def keep_operation(name: str, operation: Any) -> None:
    """Let `operation` be known by `name`."""
    _operations[name] = operation


def repeated(operation: Operation, state: torch.Tensor) -> torch.Tensor:
    """Returns the state after `operation` has drawn, from the one before."""
    from farspan.call.pytree.template import rebuild  # stands above

    name, template, tensors = operation
    args, kwargs = rebuild(template, [_stand_in(*rebuild(item, [])) for item in tensors])
    generator = torch.default_generator
    with GENERATORS, without_any_mode(), torch.no_grad():
        before = generator.get_state()
        try:
            generator.set_state(state)
            _operations[name](*args, **kwargs)
            return generator.get_state()
        finally:
            generator.set_state(before)


def _movement(operation: Operation, cached: int) -> tuple[int, int, bool] | None:
    """Returns how many numbers it draws, which normal numbers are kept then, and whether these are others than
    before."""
    key = (operation, cached)
    if key not in _known:
        while len(_known) >= _MOST_KNOWN:
            del _known[next(iter(_known))]
        _known[key] = _measure(operation, cached)
    return _known[key]


def _measure(operation: Operation, cached: int) -> tuple[int, int, bool] | None:
    with without_any_mode():
        before = with_cached_normals(torch.Generator().manual_seed(1).get_state(), cached)
        try:
            after = repeated(operation, before)
        except RuntimeError:  # it does not take the data of the stand-ins: then these may matter
            return None
    number = distance(before, after, 1 << 40)
    assert number is not None
    return number, cached_normals(after), not keeps_the_same(before, after)


def _stand_in(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor of halves, which are good for probabilities, deviations and rates."""
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    with without_any_mode():
        return torch.full((span,), 0.5 if dtype.is_floating_point else 1, dtype=dtype).as_strided(shape, stride)
