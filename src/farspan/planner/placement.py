"""Placements for throughput: each node on one device, so that the busiest device has as little to do as possible.

`place` looks for the best contiguous placement (a pipeline of stages, exactly where the graph has not too many
prefixes), then for a better one that is not contiguous, and says how far from the best possible the result can be.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from farspan.cluster import Cluster
from farspan.errors import PlanError
from farspan.planner.costed.bounds import simple_bound
from farspan.planner.costed.graph import CostedGraph
from farspan.planner.costed.merge import Merged, merge_groups
from farspan.planner.costed.problem import Problem, check_groups, make_problem
from farspan.planner.free.anneal import anneal
from farspan.planner.free.exact import exact_placement
from farspan.planner.free.milp import MAX_CHOICES, has_solver, solve_milp
from farspan.planner.free.packing import pack
from farspan.planner.search.contiguous import Contiguous, contiguous_placement
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
        return 1.0 - self.bound / self.value if self.value else 0.0


def place(
    graph: CostedGraph, cluster: Cluster, *, contiguous: bool = False, seconds: float = 20.0, seed: int = 0
) -> Placement:
    """Place the nodes of `graph` on the devices of `cluster`, by the objective max-load.

    Args:
        graph: What to place.
        cluster: Where.
        contiguous: Only stages of a pipeline: no data flows back to an earlier one.
        seconds: About how long to look. A contiguous placement ends earlier where it is known to be the best.
        seed: Of the random numbers of the search.

    Raises:
        PlanError: Nothing fits.
    """
    began = time.monotonic()
    row_problem = make_problem(graph, cluster, contiguous=True)
    problem = make_problem(graph, cluster, contiguous=False)
    check_groups(graph, cluster, problem)
    row = contiguous_placement(row_problem, until=began + seconds * (1.0 if contiguous else _CONTIGUOUS_SHARE))
    if contiguous:
        if row is None:
            check_groups(graph, cluster, row_problem)
            raise _nothing_fits(graph, cluster, row_problem, "contiguous ")
        bound = row.value if row.is_optimal else min(simple_bound(row_problem), row.value)
        return _result(graph, row_problem, row.device_of, row, bound, time.monotonic() - began)
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
    return _result(graph, problem, placed, None, bound, time.monotonic() - began)


def _regrouped(larger: Problem, smaller: Problem, device_of: Sequence[int]) -> list[int]:
    """A placement of groups as one of the groups that they are made of."""
    of_node = {node: device_of[group] for group, nodes in enumerate(larger.groups) for node in nodes}
    return [of_node[nodes[0]] for nodes in smaller.groups]


def _improved(merged: Merged, start: list[int], deadline: float, seed: int) -> tuple[list[int], float]:
    """The best free placement found, and the bound."""
    problem = merged.problem
    best, value = start, problem.max_load(start)
    bound = min(simple_bound(problem), value)
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
    return best, min(bound, problem.max_load(best))


def _result(
    graph: CostedGraph,
    problem: Problem,
    device_of: Sequence[int],
    row: Contiguous | None,
    bound: float,
    search_s: float,
) -> Placement:
    loads = problem.loads(device_of)
    classes = problem.class_of_devices()
    order = [device for device, _ in row.stages] if row else sorted(set(device_of))
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
        bound=min(bound, float(loads.max())),
        is_contiguous=row is not None,
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
