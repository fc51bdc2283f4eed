"""Infers calls that differ in numbers only (sizes of tensors, counters among the arguments) from one run on fakes.

A cache of keys and values is longer by one with each token, so that each call is a new one:

    keys [2, 4, 17, 64], mask [2, 1, 1, 18], {"seen": 17}    ->    keys [2, 4, 18, 64]
    keys [2, 4, 18, 64], mask [2, 1, 1, 19], {"seen": 18}    ->    keys [2, 4, 19, 64]
    keys [2, 4,  s, 64], mask [2, 1, 1,  t], {"seen":  u}    ->    keys [2, 4, s + 1, 64]     if t = s + 1, s > 1

Calls that are equal but for their numbers are a *family*. After a few of them the next one is also run with symbols in
the place of the numbers that vary. torch notes what the run has assumed of the symbols; where that holds, the result
is known without a run. A family whose code reads its numbers (a window that is full, a bound) has several such
patterns, one for each way through the code. A pattern that does not give what was found for single calls is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from farspan.call.draws.movement import Draws
from farspan.call.infer.entry import Entry, Unknown, intern
from farspan.call.infer.predict import predict
from farspan.call.leaf import Leaf
from farspan.call.modes import Modes
from farspan.call.pytree.holes import fill_holes, numbers_of
from farspan.call.side_effects.leaks import remove_leaked
from farspan.graph import Meta
from farspan.torch_private import SYMBOLS, Symbols

if TYPE_CHECKING:
    from farspan.call.leaf import Target
    from farspan.graph import Template

__all__ = ["Family", "Numbers", "generalise"]

_FIRST = 3
"""The most calls of a family that a pattern is compared with."""
_PATIENCE_WITH_LEAVES = 2
"""Runs on fakes after which symbols are tried for a module: the next new size is to be cheap."""
_PATIENCE = 8
"""Runs on fakes after which symbols are tried for a function, which runs in a tenth of what symbols cost."""
_MOST = 6
"""Attempts for a family; each costs a few ordinary runs."""
_COMPARED = tuple(item.name for item in fields(Entry) if item.name not in ("digest", "name"))


class Numbers:
    """A call's arguments, and the numbers in them apart."""

    __slots__ = ("first_size", "kind", "layouts", "skeleton", "values")

    def __init__(self, template: Template, metas: Sequence[Meta]) -> None:
        found: list[int] = []
        self.skeleton = numbers_of(template, found)
        self.layouts = tuple([_layout_of(meta, found) for meta in metas])
        self.first_size = len(found)
        for meta in metas:
            found.extend(meta.shape)
        self.values = tuple(found)
        """Whole numbers of the template, strides that do not follow from sizes, and sizes from `first_size` on."""
        about = tuple([(meta.dtype, meta.device, meta.requires_grad, meta.is_parameter) for meta in metas])
        self.kind = (self.skeleton, self.layouts, about)
        """Equal for calls of one family."""

    def place_of(self, metas: Sequence[Meta], number: int) -> int:
        """Returns where the first size of a tensor stands among the values."""
        return self.first_size + sum(len(meta.shape) for meta in metas[:number])

    def with_others(self, metas: Sequence[Meta], values: Sequence[Any]) -> tuple[Any, list[Meta]]:
        """Returns the template and the metadata of a call like this one but for its numbers."""
        numbers, sizes = iter(values), iter(values[self.first_size :])
        template = fill_holes(self.skeleton, numbers)
        changed: list[Meta] = []
        for meta, layout in zip(metas, self.layouts, strict=True):
            shape = [next(sizes) for _ in meta.shape]
            stride: list[Any] = [next(numbers) if inner < 0 else None for inner in layout]
            for dim in sorted(range(len(shape)), key=lambda dim: meta.stride[dim]):
                if stride[dim] is None:
                    stride[dim] = shape[layout[dim]] * stride[layout[dim]]
            changed.append(
                Meta(tuple(shape), tuple(stride), meta.dtype, meta.device, meta.requires_grad, meta.is_parameter)
            )
        return template, changed


class Pattern:
    """The results of a family's calls, for all numbers that go the same way through the code."""

    def __init__(self, entry: Entry, symbols: Symbols, fixed: dict[int, int], varying: Sequence[int]) -> None:
        self.entry = entry
        self.fixed = fixed
        """The numbers that must be as they were, by their place."""
        self.varying = tuple(varying)
        results: list[Any] = []
        self.template = numbers_of(entry.template, results)
        self.changes = numbers_of(entry.changes, results)
        self.draws = numbers_of(None if entry.draws is None else entry.draws.operations, results)
        for meta in entry.metas:
            results += [*meta.shape, *meta.stride]
        results.append(entry.flops)
        self.compute = symbols.function_of(results)

    def entry_for(self, values: Sequence[int], digest: Callable[[Any], int]) -> Entry | None:
        """Returns the prediction for a call with these numbers; None where it may go another way.

        Args:
            values: The numbers.
            digest: Returns that of the call, for what it gives.
        """
        if any(values[place] != value for place, value in self.fixed.items()):
            return None
        results = self.compute([values[place] for place in self.varying])
        if results is None:
            return None
        numbers = iter(results)
        template = fill_holes(self.template, numbers)
        changes = fill_holes(self.changes, numbers)
        draws = self.entry.draws
        if draws is not None and draws.operations:
            draws = Draws(fill_holes(self.draws, numbers), has_own=draws.has_own)
        metas: list[Meta] = []
        for meta in self.entry.metas:
            shape = tuple([next(numbers) for _ in meta.shape])
            stride = tuple([next(numbers) for _ in meta.stride])
            metas.append(intern(Meta(shape, stride, meta.dtype, meta.device, meta.requires_grad)))
        return replace(
            self.entry,
            template=template,
            changes=changes,
            metas=tuple(metas),
            flops=next(numbers),
            digest=digest((template, tuple(metas), changes)),
            draws=draws,
        )


class Family:
    """Calls of one target that differ in numbers only."""

    __slots__ = ("known", "num_attempts", "num_runs", "patience", "patterns", "varying")

    def __init__(self, target: Target) -> None:
        self.patience = _PATIENCE_WITH_LEAVES if type(target) is Leaf else _PATIENCE
        self.num_runs = 0
        self.patterns: list[Pattern] = []
        self.known: list[tuple[tuple[int, ...], Entry]] = []
        """The first calls and the last one, by their numbers."""
        self.num_attempts = 0
        self.varying: set[int] = set()
        """The places of the numbers that have been seen to vary."""

    def entry_for(self, numbers: Numbers, digest: Callable[[Any], int]) -> Entry | None:
        """Returns what is known, without a run, of a call of this family."""
        for pattern in self.patterns:
            entry = pattern.entry_for(numbers.values, digest)
            if entry is not None:
                return entry
        return None

    def is_ready(self, numbers: Numbers, entry: Entry | Unknown) -> bool:
        """Take note of a call that was run on fakes, and say whether symbols are worth a run."""
        if isinstance(entry, Unknown):
            return False
        del self.known[_FIRST - 1 :]
        self.known.append((numbers.values, entry))
        first = self.known[0][0]
        self.varying.update(place for place, value in enumerate(numbers.values) if value != first[place])
        self.num_runs += 1
        return self.num_runs >= self.patience and self.num_attempts < _MOST


def generalise(family: Family, target: Target, metas: Sequence[Meta], modes: Modes, numbers: Numbers) -> None:
    """Run the last call of `family` once more, with symbols for its numbers that vary; keep what is right."""
    family.num_attempts += 1
    values = numbers.values
    varying = sorted(family.varying)
    made: Any = []
    # Whatever goes wrong with symbols says nothing about the call, which has been run with its numbers.
    with SYMBOLS, suppress(Exception):
        symbols = Symbols()
        given: list[Any] = list(values)
        for place in varying:
            given[place] = symbols.make(values[place], is_size=place >= numbers.first_size)
        template, metas = numbers.with_others(metas, given)
        entry = predict(target, template, metas, modes, symbols=symbols, made=made)
        fixed = {place: value for place, value in enumerate(values) if place not in varying}
        pattern = Pattern(entry, symbols, fixed, varying)
        is_right = all(_is_right(pattern, known, wanted) for known, wanted in family.known)
        if is_right and pattern.entry_for(values, _no_digest):
            family.patterns.append(pattern)
    remove_leaked(made)


def _no_digest(result_parts: Any) -> int:
    return 0


def _is_right(pattern: Pattern, values: Sequence[int], wanted: Entry) -> bool:
    """Returns whether the pattern gives what a run has given; or nothing."""
    entry = pattern.entry_for(values, _no_digest)
    return entry is None or all(getattr(entry, name) == getattr(wanted, name) for name in _COMPARED)


def _layout_of(meta: Meta, strides: list[int]) -> tuple[int, ...]:
    """Returns for each dimension the one whose elements it steps over; -1 where there is none, and the stride a
    number."""
    found: list[int] = []
    for stride in meta.stride:
        inner = -1
        for dim, (size, step) in enumerate(zip(meta.shape, meta.stride, strict=True)):
            if step < stride and size * step == stride:
                inner = dim
        if inner < 0:
            strides.append(stride)
        found.append(inner)
    return tuple(found)
