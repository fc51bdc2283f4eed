"""Contiguous placements of wide graphs, where the time may end before all prefixes have been looked at."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
from benchmarks.planner_placement.placement import contiguous, loads, place
from benchmarks.planner_placement.placement.contiguous import contiguous_placement
from benchmarks.planner_placement.placement.problem import make_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.benchmarks.planner_placement.definitions import is_contiguous, max_load
from tests.planner.placement.brute_force import clusters, graphs

from farspan.cluster import Cluster, DeviceClass
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode
from farspan.planner.partition_dp.chain import best_chain
from farspan.planner.partition_dp.lattice import make_lattice

CLOSE = 1 + 1e-9
FOUR = Cluster(classes=(DeviceClass(name="gpu", kind="gpu", devices_per_host=4, memory_bytes=12.0),))


def wide(branches: int, length: int) -> CostedGraph:
    """Branches side by side between two nodes."""
    names = [[f"{branch}.{place}" for place in range(length)] for branch in range(branches)]
    ends = [("first", *row, "last") for row in names]
    seconds = itertools.cycle((3.0, 1.0, 4.0, 1.5, 5.0, 9.0, 2.0, 6.0))
    nodes = ["first", *itertools.chain(*names), "last"]
    return CostedGraph(
        nodes=tuple(CostedNode(name=name, forward_s=next(seconds), memory_bytes=1.0) for name in nodes),
        edges=tuple(
            CostedEdge(source=a, target=b, time_s=0.4, value=b) for row in ends for a, b in itertools.pairwise(row)
        ),
    )


@pytest.mark.parametrize("nearby", [20, 2_000])
def test_whenever_the_time_ends_there_is_a_placement_and_a_bound(monkeypatch: pytest.MonkeyPatch, nearby: int) -> None:
    """A clock a second later at each look: the time ends among the orders, near the best of them (20), in the whole."""
    monkeypatch.setattr(contiguous, "_NEARBY", nearby)
    problem = make_problem(wide(3, 3), FOUR, contiguous=True)
    best = contiguous_placement(problem)
    assert best is not None and best.is_optimal
    proven: list[bool] = []
    for until in range(0, 400, 8):
        clock = SimpleNamespace(monotonic=itertools.count().__next__)
        monkeypatch.setattr(loads, "time", clock)
        monkeypatch.setattr(contiguous, "time", clock)
        found = contiguous_placement(problem, until=until)
        assert found is not None
        assert found.value == problem.max_load(found.device_of) >= best.value / CLOSE
        assert found.value <= best.value * CLOSE or not found.is_optimal
        proven.append(found.is_optimal)
    assert not proven[0] and proven[-1] and proven == sorted(proven)


@settings(max_examples=40, deadline=None)
@given(graphs(max_nodes=6), clusters(), st.sampled_from((1e-9, 10.0)))
def test_the_bound_holds_however_short_the_time(graph: CostedGraph, cluster: Cluster, seconds: float) -> None:
    devices = itertools.product(range(cluster.num_devices), repeat=len(graph.nodes))
    best = min(max_load(graph, cluster, each) for each in devices if is_contiguous(graph, each))
    if math.isinf(best):
        return
    problem = make_problem(graph, cluster, contiguous=True)
    if contiguous_placement(problem, until=0.0) is None:
        return  # the orders found nothing that fits
    plan = place(graph, cluster, contiguous=True, seconds=seconds)
    assert plan.bound <= best * CLOSE and best <= plan.value * CLOSE
    assert plan.gap <= 1e-9 or seconds < 1.0


def test_a_chain_is_not_given_for_the_best_when_the_time_is_over() -> None:
    problem = make_problem(wide(2, 2), FOUR, contiguous=True)
    lattice = make_lattice(problem.num_groups, [])
    stages = loads.PlacementLoads(problem, lattice, until=0.0)
    with pytest.raises(loads.OutOfTimeError):
        best_chain([(stages, problem.counts)])


def test_classes_one_after_the_other_where_their_product_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contiguous, "_MOST_STATES", 100)
    nodes = tuple(CostedNode(name=f"n{i}", forward_s=1.0) for i in range(12))
    edges = tuple(CostedEdge(source=f"n{i}", target=f"n{i + 1}", time_s=0.1) for i in range(11))
    classes = tuple(
        DeviceClass(name=name, kind=name, devices_per_host=2, speed=speed) for name, speed in (("a", 1.0), ("b", 2.0))
    )
    problem = make_problem(CostedGraph(nodes=nodes, edges=edges), Cluster(classes=classes), contiguous=True)
    found = contiguous_placement(problem)
    assert found is not None and not found.is_optimal
    assert found.value == problem.max_load(found.device_of) == pytest.approx(2.2)


def test_a_thousand_devices_of_four_classes() -> None:
    nodes = tuple(CostedNode(name=f"n{i}", forward_s=1.0) for i in range(300))
    classes = tuple(DeviceClass(name=name, kind=name, num_hosts=32, devices_per_host=8) for name in "abcd")
    placed = place(CostedGraph(nodes=nodes), Cluster(classes=classes), contiguous=True, seconds=5.0)
    assert placed.value == 1.0 and placed.bound == 1.0
