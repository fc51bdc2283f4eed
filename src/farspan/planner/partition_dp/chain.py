"""The best chain of stages, by dynamic programming from the last stage to the first.

With `best(i, k, s)` the best objective of all that comes after prefix i, on at most k devices of each class, with at
most s replicas in this and all later stages:

    best(i, k, s) = min over ends j of i, and options o, of
                    best(j, k - num_devices(o), s - replicas(o))  (+)  load(i, j, o, s)

where (+) is max (the slowest stage), or + for loads up to a cap (the sum of all stages). The number s matters to loads
that depend on how many micro-batches are in flight (1F1B); without these there is one s only. As a product over many
classes k has too many values; then the classes come in an order, each in a phase of its own: best of the next phase is
where a phase may end. Where not all numbers of devices may be left over in the end, best(all, k, s) is infinite for the
others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Chain", "IntArray", "Loads", "StageOption", "Step", "best_chain"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOption:
    """A way to run a stage: on how many devices of which class, as how many replicas of how many devices.

    Attributes:
        device_class: Its index.
        replicas: How many.
        tensor_parallel: Devices of each.
        is_counted: Whether its devices are counted; not where no two stages can run on that class anyway.
    """

    device_class: int
    replicas: int = 1
    tensor_parallel: int = 1
    is_counted: bool = True

    @property
    def num_devices(self) -> int:
        """Returns how many of the counted devices it takes."""
        return self.replicas * self.tensor_parallel if self.is_counted else 0


class Loads(Protocol):
    """The costs of stages. Prefixes are numbers; 0 is empty, `num_prefixes - 1` is everything."""

    @property
    def num_prefixes(self) -> int: ...
    @property
    def options(self) -> Sequence[StageOption]: ...
    @property
    def num_depths(self) -> int:
        """1 if loads do not depend on the replicas of later stages, else the largest number of these plus 1."""
        ...

    def ends(self, start: int) -> IntArray:
        """Returns where a stage that begins at `start` may end, in rising order; empty if no good chain passes
        there."""
        ...

    def loads(self, start: int, ends: IntArray) -> Sequence[FloatArray]:
        """Returns for each option the loads, [ends, num_depths]; infinite where that cannot be."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One stage of a chain: from prefix `start` to `end`, by option number `option` of phase `phase`."""

    start: int
    end: int
    phase: int
    option: int
    depth: int
    load: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The stages found, from first to last, and the objective."""

    value: float
    steps: tuple[Step, ...]


def best_chain(
    phases: Sequence[tuple[Loads, Sequence[int]]],
    *,
    upper: float = math.inf,
    total: bool = False,
    may_remain: Sequence[NDArray[np.bool_] | None] | None = None,
) -> Chain | None:
    """Returns the best chain of stages from the empty prefix to the full one; None where there is none.

    Args:
        phases: Loads and the devices of each class. One phase has all classes in any order; several phases have some
            classes each, and the stages of a phase come before those of the next.
        upper: No stage may cost more.
        total: Minimise the sum of the loads instead of the largest.
        may_remain: For each phase [devices of each class]: whether so many may be left over; None for any.
    """
    tables: list[FloatArray] = []
    entry: FloatArray | None = None  # [prefix, depth]: the best of all later phases
    remain = [None] * len(phases) if may_remain is None else list(may_remain)
    for (loads, counts), allowed in zip(reversed(phases), reversed(remain), strict=True):
        tables.append(_table(loads, counts, upper, total, entry, allowed))
        entry = tables[-1][(slice(None), *counts)]
    tables.reverse()
    assert entry is not None
    depth = int(entry[0].argmin())
    if not math.isfinite(entry[0, depth]):
        return None
    value, at, steps = float(entry[0, depth]), 0, list[Step]()
    for phase, (loads, counts) in enumerate(phases):
        left = list(counts)
        after = tables[phase + 1][(slice(None), *phases[phase + 1][1])] if phase + 1 < len(phases) else None
        while at < loads.num_prefixes - 1:
            allowed = remain[phase]
            may_end = allowed is None or allowed[tuple(left)]
            if after is not None and may_end and after[at, depth] == tables[phase][(at, *left, depth)]:
                break
            step = _first_step(loads, tables[phase], at, left, depth, upper, total)
            steps.append(Step(start=at, end=step[0], phase=phase, option=step[1], depth=depth, load=step[2]))
            option = loads.options[step[1]]
            at = step[0]
            left[option.device_class] -= option.num_devices
            depth -= option.replicas if loads.num_depths > 1 else 0
    return Chain(value=value, steps=tuple(steps))


def _table(
    loads: Loads,
    counts: Sequence[int],
    upper: float,
    total: bool,
    entry: FloatArray | None,
    allowed: NDArray[np.bool_] | None,
) -> FloatArray:
    shape = (*(count + 1 for count in counts), loads.num_depths)
    table: FloatArray = np.full((loads.num_prefixes, *shape), math.inf)
    table[-1] = 0.0
    if entry is not None:
        table[:] = entry.reshape(len(table), *(1 for _ in counts), loads.num_depths)
    if allowed is not None:
        table[:, ~allowed] = math.inf
    alive = np.array([bool(np.isfinite(each).any()) for each in table])
    for start in range(loads.num_prefixes - 2, -1, -1):
        ends = loads.ends(start)
        ends = ends[alive[ends]]
        if not len(ends):
            continue
        best = table[start]
        for option, load in zip(loads.options, loads.loads(start, ends), strict=True):
            keep = np.flatnonzero(load.min(axis=1) <= upper)
            if not len(keep) or option.num_devices > counts[option.device_class]:
                continue
            if loads.num_depths > 1 and option.replicas >= loads.num_depths:
                continue
            later, here = _shifted(table, ends[keep], best, option, loads.num_depths)
            load = load[keep]
            load = np.where(load <= upper, load, math.inf)[:, -later.shape[-1] :]
            load = load.reshape(len(keep), *(1 for _ in counts), later.shape[-1])
            np.minimum(here, ((later + load) if total else np.maximum(later, load)).min(axis=0), out=here)
        alive[start] = bool(np.isfinite(best).any())
    return table


def _shifted(
    table: FloatArray, ends: IntArray, best: FloatArray, option: StageOption, num_depths: int
) -> tuple[FloatArray, FloatArray]:
    """Returns what comes after `ends` with what an option takes subtracted, and the part of `best` that this is for."""
    axis, taken = option.device_class, option.num_devices
    later_at: list[slice] = [slice(None)] * (best.ndim)
    here_at: list[slice] = [slice(None)] * (best.ndim)
    later_at[axis] = slice(0, best.shape[axis] - taken)
    here_at[axis] = slice(taken, None)
    if num_depths > 1:
        later_at[-1] = slice(0, num_depths - option.replicas)
        here_at[-1] = slice(option.replicas, None)
    return table[ends][(slice(None), *later_at)], best[tuple(here_at)]


def _first_step(
    loads: Loads, table: FloatArray, start: int, left: Sequence[int], depth: int, upper: float, total: bool
) -> tuple[int, int, float]:
    """Returns the end, option and load of a first stage that reaches the best objective: the one with the least to
    do."""
    wanted = table[(start, *left, depth)]
    ends = loads.ends(start)
    found = (-1, -1, math.inf)
    for index, (option, load) in enumerate(zip(loads.options, loads.loads(start, ends), strict=True)):
        after, later_depth = list(left), depth - (option.replicas if loads.num_depths > 1 else 0)
        after[option.device_class] -= option.num_devices
        if after[option.device_class] < 0 or later_depth < 0:
            continue
        later = table[(ends, *after, later_depth)]
        here = np.where(load[:, depth] <= upper, load[:, depth], math.inf)
        values = later + here if total else np.maximum(later, here)
        for at in np.flatnonzero(values == wanted):
            if here[at] < found[2]:
                found = (int(ends[at]), index, float(here[at]))
    assert found[1] >= 0, "no step reaches the value of the table"
    return found
