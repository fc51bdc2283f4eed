"""Contiguous placements: each device has one stage of a pipeline.

Exact where the graph has few enough prefixes, and the time is enough to look at them all. Elsewhere: the best cuts of a
few linear orders, then of all prefixes a few groups away from those cuts, and again, until nothing is gained.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from benchmarks.planner_placement.placement.loads import OutOfTimeError, PlacementLoads
from benchmarks.planner_placement.placement.problem import Problem

from farspan.planner.partition_dp.chain import Chain, best_chain
from farspan.planner.partition_dp.lattice import Lattice, all_prefixes, linear_order, make_lattice

__all__ = ["Contiguous", "contiguous_placement"]

MAX_PREFIXES = 60_000
_NEARBY = 2_000
_MAX_ROUNDS = 8
_MOST_STATES = 3e7
"""Prefixes times numbers of devices of all classes together; of more, classes come one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contiguous:
    """A contiguous placement.

    Attributes:
        device_of: [group].
        stages: For each stage, in order: its device and its groups.
        value: The max-load.
        is_optimal: No contiguous placement has a smaller one.
    """

    device_of: tuple[int, ...]
    stages: tuple[tuple[int, tuple[int, ...]], ...]
    value: float
    is_optimal: bool


def contiguous_placement(problem: Problem, *, until: float = math.inf) -> Contiguous | None:
    """The best contiguous placement found; None where none fits.

    Args:
        problem: What to place.
        until: When to be content with the best found, on the clock of `time.monotonic`.
    """
    if not np.isfinite(problem.time_s).any(axis=1).all():
        return None  # some group may lie nowhere
    first = _from_orders(problem, until)
    prefixes = all_prefixes(problem.num_groups, problem.before, limit=MAX_PREFIXES)
    if first is not None and (prefixes is None or len(prefixes) > _NEARBY):
        first = _refined(problem, first, until)  # the better what is known, the less there is to look at
    if prefixes is None or time.monotonic() > until:
        return first
    lattice = make_lattice(problem.num_groups, prefixes, is_complete=True)
    try:
        found = _on_lattice(problem, lattice, first.value if first else math.inf, until)
    except OutOfTimeError:
        return first
    return found or first


def _from_orders(problem: Problem, until: float) -> Contiguous | None:
    """The best cut of some linear orders, or of the first alone if that took all the time."""
    found: list[Contiguous] = []
    for depth_first in (True, False):
        for sign in (1, -1):
            if found and time.monotonic() > until:
                break
            order = linear_order(
                problem.num_groups,
                problem.before,
                keys=[sign * group for group in range(problem.num_groups)],
                depth_first=depth_first,
            )
            upper = min((each.value for each in found), default=math.inf)
            placed = _on_lattice(problem, _order_lattice(order), upper)
            found += [placed] if placed else []
    return min(found, key=lambda each: each.value, default=None)


def _order_lattice(order: list[int]) -> Lattice:
    prefixes, prefix = [0], 0
    for group in order:
        prefix |= 1 << group
        prefixes.append(prefix)
    return make_lattice(len(order), prefixes)


def _refined(problem: Problem, found: Contiguous, until: float) -> Contiguous:
    for seed in range(_MAX_ROUNDS):
        cuts, prefix = [0], 0
        for _, groups in found.stages:
            prefix |= sum(1 << group for group in groups)
            cuts.append(prefix)
        near = _nearby_prefixes(cuts, problem.num_groups, problem.before, limit=_NEARBY, seed=seed)
        try:
            better = _on_lattice(problem, make_lattice(problem.num_groups, near), found.value, until)
        except OutOfTimeError:
            return found
        if better is None or better.value >= found.value * (1 - 1e-9):
            return found
        found = better
    return found


def _on_lattice(problem: Problem, lattice: Lattice, upper: float, until: float = math.inf) -> Contiguous | None:
    loads = PlacementLoads(problem, lattice, upper=upper, until=until)
    if math.prod(count + 1 for count in problem.counts) * loads.num_prefixes <= _MOST_STATES:
        chain = best_chain([(loads, problem.counts)], upper=upper * (1 + 1e-9))
        return _placed(problem, lattice, chain, [range(len(problem.counts))]) if chain else None
    found: list[Contiguous] = []
    for order in _orders_of_classes(problem):
        phases = [(loads.only(index), (problem.counts[index],)) for index in order]
        limit = min((each.value for each in found), default=upper) * (1 + 1e-9)
        chain = best_chain(phases, upper=limit)
        found += [_placed(problem, lattice, chain, [(index,) for index in order])] if chain else []
    return min(found, key=lambda each: each.value, default=None)


def _orders_of_classes(problem: Problem) -> list[tuple[int, ...]]:
    """Classes one after the other: the fast ones first, or last, or those of much memory."""
    work = np.where(np.isfinite(problem.time_s), problem.time_s, 0.0).sum(axis=0)
    keys = (work, -work, -problem.limits, problem.limits)
    return list(dict.fromkeys(tuple(int(index) for index in np.argsort(key, kind="stable")) for key in keys))


def _placed(problem: Problem, lattice: Lattice, chain: Chain, classes: Sequence[Sequence[int]]) -> Contiguous:
    """The placement that a chain is; `classes` are those of each of its phases."""
    firsts = [sum(problem.counts[:index]) for index in range(len(problem.counts))]
    device_of = [-1] * problem.num_groups
    stages: list[tuple[int, tuple[int, ...]]] = []
    for step in chain.steps:
        groups, index = tuple(lattice.difference(step.start, step.end)), classes[step.phase][step.option]
        for group in groups:
            device_of[group] = firsts[index]
        stages.append((firsts[index], groups))
        firsts[index] += 1
    return Contiguous(
        device_of=tuple(device_of),
        stages=tuple(stages),
        value=problem.max_load(device_of),
        is_optimal=lattice.is_complete and len(classes) == 1,
    )


def _nearby_prefixes(
    prefixes: Iterable[int], num_groups: int, before: Sequence[tuple[int, int]], *, limit: int, seed: int
) -> set[int]:
    """Prefixes a few groups away from the given ones: up to `limit`, those one step away first."""
    needs, blocks = [0] * num_groups, [0] * num_groups
    for a, b in before:
        needs[b] |= 1 << a
        blocks[a] |= 1 << b
    rng = random.Random(seed)
    found = set(prefixes)
    layer = sorted(found)
    while layer and len(found) < limit:
        rng.shuffle(layer)
        grown: list[int] = []
        for prefix in layer:
            for group in range(num_groups):
                bit = 1 << group
                if prefix & bit:
                    other = prefix ^ bit if not blocks[group] & prefix else prefix
                else:
                    other = prefix | bit if not needs[group] & ~prefix else prefix
                if other not in found:
                    found.add(other)
                    grown.append(other)
            if len(found) >= limit:
                break
        layer = grown
    return found
