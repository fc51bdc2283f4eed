"""Placements of small graphs against trying all: the optimum, the bound, memory, and no device without a node."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

import pytest
from benchmarks.planner_placement.placement import place
from benchmarks.planner_placement.placement.bound import simple_bound
from benchmarks.planner_placement.placement.free.anneal import Placing, anneal
from benchmarks.planner_placement.placement.free.merge import merge_groups
from benchmarks.planner_placement.placement.free.milp import solve_milp
from benchmarks.planner_placement.placement.problem import make_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.benchmarks.planner_placement.definitions import is_contiguous, max_load
from tests.planner.placement.brute_force import clusters, graphs

from farspan.cluster import Cluster, DeviceClass
from farspan.errors import PlanError
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode

CLOSE = 1 + 1e-9
WITHOUT_TRANSFERS = st.sampled_from([(), ("b",)])


def placements(graph: CostedGraph, cluster: Cluster):
    return itertools.product(range(cluster.num_devices), repeat=len(graph.nodes))


def device_of(graph: CostedGraph, cluster: Cluster, plan) -> list[int]:
    """The placement, with each device numbered through the classes; fails where a node is missing or there twice."""
    firsts = dict(
        zip(
            [each.name for each in cluster.classes],
            itertools.accumulate([0] + [each.num_devices for each in cluster.classes]),
            strict=False,
        )
    )
    where = {name: firsts[each.device_class] + each.index for each in plan.devices for name in each.nodes}
    assert sum(len(each.nodes) for each in plan.devices) == len(graph.nodes)
    return [where[node.name] for node in graph.nodes]


def check(graph: CostedGraph, cluster: Cluster, without_transfers: Collection[str] = (), *, contiguous: bool) -> None:
    values = [
        max_load(graph, cluster, each, without_transfers)
        for each in placements(graph, cluster)
        if not contiguous or is_contiguous(graph, each)
    ]
    best = min(values)
    try:
        plan = place(graph, cluster, contiguous=contiguous, seconds=2.0, without_transfers=without_transfers)
    except PlanError:
        assert math.isinf(best)
        return
    found = device_of(graph, cluster, plan)
    assert math.isclose(max_load(graph, cluster, found, without_transfers), plan.value, rel_tol=1e-9, abs_tol=1e-12)
    assert plan.value <= best * CLOSE and plan.bound <= best * CLOSE
    assert all(each.nodes for each in plan.devices)
    if contiguous:
        assert is_contiguous(graph, found)


@settings(max_examples=60, deadline=None)
@given(graphs(max_nodes=7), clusters(), WITHOUT_TRANSFERS)
def test_a_free_placement_is_the_best_of_all(graph: CostedGraph, cluster: Cluster, free: Collection[str]) -> None:
    check(graph, cluster, free, contiguous=False)


@settings(max_examples=60, deadline=None)
@given(graphs(max_nodes=6), clusters(), WITHOUT_TRANSFERS)
def test_a_contiguous_placement_is_the_best_of_all_contiguous_ones(
    graph: CostedGraph, cluster: Cluster, free: Collection[str]
) -> None:
    check(graph, cluster, free, contiguous=True)


@settings(max_examples=30, deadline=None)
@given(graphs(max_nodes=6, training=True), clusters())
def test_backward_nodes_have_no_say_in_the_order(graph: CostedGraph, cluster: Cluster) -> None:
    try:
        plan = place(graph, cluster, contiguous=True)
    except PlanError:
        return
    assert is_contiguous(graph, device_of(graph, cluster, plan))


@settings(max_examples=8, deadline=None)
@given(graphs(max_nodes=10).filter(lambda graph: len(graph.nodes) >= 9), clusters(max_devices=2))
def test_ten_nodes_too(graph: CostedGraph, cluster: Cluster) -> None:
    check(graph, cluster, contiguous=False)


@settings(max_examples=40, deadline=None)
@given(graphs(max_nodes=6), clusters(), st.integers(0, 3))
def test_the_searches_for_large_graphs_keep_what_they_promise(graph: CostedGraph, cluster: Cluster, seed: int) -> None:
    best = min(max_load(graph, cluster, each) for each in placements(graph, cluster))
    if math.isinf(best):
        return
    problem = make_problem(graph, cluster, contiguous=False)
    assert simple_bound(problem) <= best * CLOSE
    merged = merge_groups(problem)
    start = merged.together(_first_feasible(problem))
    if math.isinf(merged.problem.max_load(start)):
        return
    value, found = anneal(merged.problem, start, num_moves=2_000, seed=seed)
    assert best <= value * CLOSE and value <= merged.problem.max_load(start) * CLOSE
    assert math.isclose(problem.max_load(merged.apart(found)), value, rel_tol=1e-9, abs_tol=1e-12)
    placing = Placing(merged.problem, found)
    assert all(used <= limit for used, limit in zip(placing.used, placing.limits, strict=True))


def _first_feasible(problem) -> tuple[int, ...]:
    every = itertools.product(range(problem.num_devices), repeat=problem.num_groups)
    return next(each for each in every if math.isfinite(problem.max_load(each)))


@settings(max_examples=25, deadline=None)
@given(graphs(max_nodes=6), clusters())
def test_the_bound_of_the_integer_program_is_a_bound(graph: CostedGraph, cluster: Cluster) -> None:
    best = min(max_load(graph, cluster, each) for each in placements(graph, cluster))
    if math.isinf(best) or best == 0:
        return
    problem = make_problem(graph, cluster, contiguous=False)
    found, bound = solve_milp(problem, _first_feasible(problem), seconds=5.0)
    assert best * (1 - 1e-4) <= bound <= best * CLOSE
    assert found is None or best <= problem.max_load(found) * CLOSE


def test_the_solvers_presolve_is_not_believed() -> None:
    names = ("none", "first", "second")
    nodes = tuple(
        CostedNode(name=name, forward_s=seconds, devices=devices)
        for name, seconds, devices in zip(names, (0.0, 2.0, 2.0), (None, ("a",), None), strict=True)
    )
    edge = CostedEdge(source="first", target="second", time_s=1.0)
    classes = (
        DeviceClass(name="a", kind="a", memory_bytes=4.0),
        DeviceClass(name="b", kind="b", devices_per_host=2, memory_bytes=4.0),
    )
    graph, cluster = CostedGraph(nodes=nodes, edges=(edge,)), Cluster(classes=classes)
    problem = make_problem(graph, cluster, contiguous=False, without_transfers={"b"})
    found, bound = solve_milp(problem, [0, 0, 0], seconds=5.0)
    assert found is not None and problem.max_load(found) == 3.0
    assert bound == pytest.approx(3.0, rel=1e-4) and bound <= 3.0


def test_a_value_is_charged_once_to_each_device_that_it_leaves_or_enters() -> None:
    names = ("a", "b", "c", "d")
    nodes = tuple(CostedNode(name=name, forward_s=1.0, memory_bytes=1.0) for name in names)
    edges = tuple(CostedEdge(source="a", target=name, time_s=5.0) for name in names[1:])
    graph = CostedGraph(nodes=nodes, edges=edges)
    cluster = Cluster(classes=(DeviceClass(name="gpu", kind="gpu", devices_per_host=2, memory_bytes=2.0),))
    plan = place(graph, cluster)
    assert plan.value == plan.bound == 7.0


def test_a_non_contiguous_placement_wins_where_it_can() -> None:
    """Two heavy ends and a light middle: the ends share a device only if the middle may lie elsewhere."""
    nodes = tuple(CostedNode(name=f"n{i}", forward_s=seconds) for i, seconds in enumerate((3.0, 4.0, 1.0)))
    edges = tuple(CostedEdge(source=f"n{i}", target=f"n{i + 1}", time_s=0.01) for i in range(2))
    graph = CostedGraph(nodes=nodes, edges=edges)
    cluster = Cluster(classes=(DeviceClass(name="gpu", kind="gpu", devices_per_host=2),))
    assert place(graph, cluster).value == pytest.approx(4.02)
    assert place(graph, cluster, contiguous=True).value == pytest.approx(5.01)


def test_what_does_not_fit_is_an_error_with_the_sizes() -> None:
    graph = CostedGraph(nodes=(CostedNode(name="big", memory_bytes=2**31),))
    cluster = Cluster(classes=(DeviceClass(name="gpu", kind="gpu", memory_bytes=2**30),))
    with pytest.raises(PlanError, match='"big" fits on no device') as caught:
        place(graph, cluster)
    assert "2.0 GiB" in caught.value.why and "1.0 GiB" in caught.value.why and caught.value.hint


def test_one_of_two_hosts_where_the_link_between_them_is_slow() -> None:
    nodes = tuple(CostedNode(name=name, forward_s=1.0) for name in "ab")
    graph = CostedGraph(nodes=nodes, edges=(CostedEdge(source="a", target="b", size_bytes=1.0),))
    hosts = DeviceClass(
        name="gpu", kind="gpu", num_hosts=2, devices_per_host=2, within_bytes_per_s=200.0, between_bytes_per_s=0.1
    )
    for contiguous in (True, False):
        placed = place(graph, Cluster(classes=(hosts,)), contiguous=contiguous, seconds=1.0)
        assert placed.value == pytest.approx(1.005) and placed.bound <= 1.005 * (1 + 1e-6)
