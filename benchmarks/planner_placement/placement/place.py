"""Placements for throughput: each node on one device, so that the busiest device has as little to do as possible.

`place` looks for the best contiguous placement (a pipeline of stages, exactly where the graph has not too many
prefixes), then for a better one that is not contiguous, and says how far from the best possible the result can be.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from benchmarks.planner_placement.placement.bound import simple_bound
from benchmarks.planner_placement.placement.by_hosts import ByPairs
from benchmarks.planner_placement.placement.contiguous import contiguous_placement
from benchmarks.planner_placement.placement.free.anneal import anneal
from benchmarks.planner_placement.placement.free.exact import exact_placement
from benchmarks.planner_placement.placement.free.merge import Merged, merge_groups
from benchmarks.planner_placement.placement.free.milp import MAX_CHOICES, has_solver, solve_milp
from benchmarks.planner_placement.placement.free.packing import pack
from benchmarks.planner_placement.placement.problem import Problem, check_groups, make_problem

from farspan.cluster import Cluster
from farspan.errors import PlanError
from farspan.planner.cost_model.colocation import FloatArray
from farspan.planner.cost_model.costed_graph import CostedGraph
from farspan.units import format_bytes

__all__ = ["DeviceLoad", "Placement", "place"]

_EXACT_GROUPS = 14
_PACKED_GROUPS = 200
_NUM_MOVES = 60_000
_HOT = (0.003, 0.01, 0.001, 0.03)
_MAX_ROUNDS = 24
_SOLVED = 1e-5
_CONTIGUOUS_SHARE = 0.6
"""Of the time for a free placement, what the contiguous one that it starts from may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoad:
    """What one device does.

    Attributes:
        device_class: Name of its class.
        index: Which one of that class.
        nodes: Names, in the order of the graph; never empty.
        load_s: Seconds a micro-batch takes it, transfers and all.
        memory_bytes: What lies there.
    """

    device_class: str
    index: int
    nodes: tuple[str, ...]
    load_s: float
    memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The result of `place`.

    Attributes:
        devices: Those that have something to do; of a contiguous placement in the order of the pipeline.
        value: The largest load, in seconds.
        bound: No placement (of this kind) has a smaller one.
        is_contiguous: Whether it was to be contiguous.
        search_s: How long the search took.
    """

    devices: tuple[DeviceLoad, ...]
    value: float
    bound: float
    is_contiguous: bool
    search_s: float

    @property
    def gap(self) -> float:
        """How much better, as a share of its value, the best placement can be at most."""
        return max(0.0, 1.0 - self.bound / self.value) if self.value else 0.0


def place(
    graph: CostedGraph,
    cluster: Cluster,
    *,
    contiguous: bool = False,
    seconds: float = 20.0,
    seed: int = 0,
    without_transfers: Collection[str] = (),
) -> Placement:
    """Place the nodes of `graph` on the devices of `cluster`, by the objective max-load.

    Args:
        graph: What to place.
        cluster: Where.
        contiguous: Only stages of a pipeline: no data flows back to an earlier one.
        seconds: About how long to look. A contiguous placement ends earlier where it is known to be the best.
        seed: Of the random numbers of the search.
        without_transfers: Names of classes on whose devices transfers take no time.

    Raises:
        PlanError: Nothing fits.
    """
    began = time.monotonic()

    def problem(*, contiguous: bool, is_near: bool = False) -> Problem:
        return make_problem(graph, cluster, contiguous=contiguous, is_near=is_near, without_transfers=without_transfers)

    check_groups(graph, cluster, problem(contiguous=False))
    ways = (False, True) if cluster.has_near_links else (False,)
    found = [
        _place(
            graph,
            cluster,
            problem(contiguous=True, is_near=is_near),
            None if contiguous else problem(contiguous=False, is_near=is_near),
            seconds=seconds / len(ways),
            seed=seed,
        )
        for is_near in ways
    ]
    by_pairs = ByPairs(found[0].problem, found[-1].problem, cluster)
    best = min(found, key=lambda each: by_pairs.loads(each.device_of).max())
    loads = by_pairs.loads(best.device_of)
    return _result(graph, best, loads, found[-1].bound, time.monotonic() - began)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A placement of the groups of `problem`, a bound for all others of it, and the order of its devices in a row."""

    problem: Problem
    device_of: Sequence[int]
    bound: float
    order: Sequence[int] | None = None


def _place(
    graph: CostedGraph, cluster: Cluster, row_problem: Problem, problem: Problem | None, *, seconds: float, seed: int
) -> _Found:
    """A placement where all transfers of a device take the same: as to the nearest other device, or as to any.

    It is contiguous where there is no `problem` without an order of stages.
    """
    began = time.monotonic()
    row = contiguous_placement(row_problem, until=began + seconds * (1.0 if problem is None else _CONTIGUOUS_SHARE))
    if problem is None:
        if row is None:
            check_groups(graph, cluster, row_problem)
            raise _nothing_fits(graph, cluster, row_problem, "contiguous ")
        bound = row.value if row.is_optimal else simple_bound(row_problem)
        order = [device for device, _ in row.stages]
        return _Found(problem=row_problem, device_of=row.device_of, bound=bound, order=order)
    merged = merge_groups(problem)
    known = _regrouped(row_problem, problem, row.device_of) if row else None
    start = merged.together(known) if known else None
    if start is None or not math.isfinite(merged.problem.max_load(start)):
        start = pack(merged.problem, seed)
        if start is None and merged.problem.num_groups <= _PACKED_GROUPS:
            start, _ = exact_placement(merged.problem, math.inf)
    if start is None:
        raise _nothing_fits(graph, cluster, problem, "")
    device_of, bound = _improved(merged, start, began + seconds, seed)
    placed = merged.apart(device_of)
    if known is not None and problem.max_load(known) <= problem.max_load(placed):
        placed = known
    return _Found(problem=problem, device_of=placed, bound=bound)


def _regrouped(larger: Problem, smaller: Problem, device_of: Sequence[int]) -> list[int]:
    """A placement of groups as one of the groups that they are made of."""
    of_node = {node: device_of[group] for group, nodes in enumerate(larger.groups) for node in nodes}
    return [of_node[nodes[0]] for nodes in smaller.groups]


def _improved(merged: Merged, start: list[int], deadline: float, seed: int) -> tuple[list[int], float]:
    """The best free placement found, and the bound."""
    problem = merged.problem
    best, value = start, problem.max_load(start)
    bound = simple_bound(problem)
    if problem.num_groups <= _EXACT_GROUPS:
        found, is_done = exact_placement(problem, value * (1 + 1e-12))
        if is_done:
            best = found or best
            return best, problem.max_load(best)
    began = time.monotonic()
    with_solver = has_solver() and problem.num_groups * problem.num_devices <= MAX_CHOICES
    stop = began + (deadline - began) * (0.4 if with_solver else 1.0)
    unchanged = 0
    for number in range(_MAX_ROUNDS):
        if time.monotonic() > stop or value <= bound * (1 + _SOLVED) or unchanged == 2 * len(_HOT):
            break
        hot = _HOT[number % len(_HOT)]
        found_value, found = anneal(
            problem,
            best if number % 3 else start,
            num_moves=max(_NUM_MOVES, 400 * problem.num_groups),
            seed=seed + number,
            deadline=stop,
            hot=hot,
        )
        unchanged += 1
        if found_value < value * (1 - 1e-9):
            best, value, unchanged = found, found_value, 0
    if with_solver and value > bound * (1 + _SOLVED):
        found, proven = solve_milp(problem, best, seconds=max(deadline - time.monotonic(), 1.0))
        best = found or best
        bound = max(bound, proven)
    return best, bound


def _result(graph: CostedGraph, found: _Found, loads: FloatArray, bound: float, search_s: float) -> Placement:
    problem, device_of = found.problem, found.device_of
    classes = problem.class_of_devices()
    order = sorted(set(device_of)) if found.order is None else found.order
    firsts = [sum(problem.counts[:index]) for index in range(len(problem.counts))]
    devices: list[DeviceLoad] = []
    for device in order:
        groups = [group for group, at in enumerate(device_of) if at == device]
        nodes = sorted(index for group in groups for index in problem.groups[group])
        devices.append(
            DeviceLoad(
                device_class=problem.class_names[classes[device]],
                index=device - firsts[classes[device]],
                nodes=tuple(graph.nodes[index].name for index in nodes),
                load_s=float(loads[device]),
                memory_bytes=float(problem.memory_bytes[groups].sum()),
            )
        )
    return Placement(
        devices=tuple(devices),
        value=float(loads.max()),
        bound=bound,
        is_contiguous=found.order is not None,
        search_s=search_s,
    )


def _nothing_fits(graph: CostedGraph, cluster: Cluster, problem: Problem, kind: str) -> PlanError:
    have = sum(each.memory_bytes * each.num_devices for each in cluster.classes)
    needed = float(problem.memory_bytes.sum())
    return PlanError(
        f"{graph.source}: no {kind}placement on these {cluster.num_devices} devices was found.",
        why=f"the nodes need {format_bytes(needed)}, the devices have {format_bytes(have)}"
        + (" together, in pieces into which the nodes do not fit." if needed <= have else "."),
        hint="more devices, devices of more memory, or finer nodes",
    )
