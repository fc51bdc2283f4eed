"""Pipelines of small graphs against trying all stages, classes, replicas, degrees and options."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planner.placement.brute_force import clusters, graphs, pipeline_objectives

from farspan.cluster import Cluster, DeviceClass
from farspan.errors import PlanError
from farspan.planner import Rules, plan_pipeline
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode, NodeOption

CLOSE = 1 + 1e-6


def check_plan(graph: CostedGraph, cluster: Cluster, plan) -> None:
    assert sorted(name for stage in plan.stages for name in stage.nodes) == sorted(node.name for node in graph.nodes)
    for kind in cluster.classes:
        stages = [stage for stage in plan.stages if stage.device_class == kind.name]
        assert sum(stage.replicas * stage.tensor_parallel for stage in stages) <= kind.num_devices
        assert all(stage.nodes and stage.memory_bytes <= kind.memory_bytes * (1 + 1e-9) for stage in stages)


@pytest.mark.parametrize("which", [0, 1])
@settings(max_examples=40, deadline=None)
@given(
    graph=graphs(max_nodes=4, options=True), cluster=clusters(bandwidth=2.0), micro_batches=st.sampled_from([1, 2, 4])
)
def test_a_pipeline_is_within_its_gap_of_the_best_of_all(
    which: int, graph: CostedGraph, cluster: Cluster, micro_batches: int
) -> None:
    rules = Rules(micro_batches=micro_batches)
    best = min((each[which] for each in pipeline_objectives(graph, cluster, rules)), default=math.inf)
    try:
        plan = plan_pipeline(graph, cluster, rules=rules, objective=("bottleneck", "step-time")[which])
    except PlanError:
        assert math.isinf(best)
        return
    check_plan(graph, cluster, plan)
    assert plan.bound <= best * CLOSE
    assert best <= plan.value * CLOSE
    rates, fill = [stage.rate_s for stage in plan.stages], sum(stage.once_s for stage in plan.stages)
    drain = max(stage.drain_s for stage in plan.stages)
    assert plan.value == pytest.approx(max(rates) if which == 0 else fill + drain)


@settings(max_examples=40, deadline=None)
@given(graph=graphs(max_nodes=5), cluster=clusters(bandwidth=2.0))
def test_without_remat_the_slowest_stage_is_the_best_of_all(graph: CostedGraph, cluster: Cluster) -> None:
    plain = CostedGraph(
        nodes=tuple(CostedNode(name=node.name, forward_s=node.forward_s) for node in graph.nodes), edges=graph.edges
    )
    rules = Rules(micro_batches=4)
    best = min(each[0] for each in pipeline_objectives(plain, cluster, rules))
    plan = plan_pipeline(plain, cluster, rules=rules, objective="bottleneck")
    assert plan.value == pytest.approx(best) and plan.bound == pytest.approx(best)


def test_remat_where_memory_asks_for_it_and_nowhere_else() -> None:
    remat = NodeOption(name="remat", forward_s=1.0, backward_s=3.0, saved_bytes=1.0)
    nodes = tuple(
        CostedNode(name=f"b{i}", forward_s=1.0, backward_s=2.0, saved_bytes=10.0, options=(remat,)) for i in range(4)
    )
    graph = CostedGraph(nodes=nodes)
    device = DeviceClass(name="gpu", kind="gpu", memory_bytes=25.0)
    plan = plan_pipeline(graph, Cluster(classes=(device,)), rules=Rules(micro_batches=4))
    assert len(plan.stages) == 1 and len(plan.stages[0].options) == 2
    assert plan.stages[0].memory_bytes == 22.0 and plan.value == 4 * 14.0


def test_one_device_is_a_plan_and_wins_where_links_are_slow() -> None:
    nodes = tuple(CostedNode(name=f"n{i}", forward_s=1.0, parameter_bytes=1e12) for i in range(3))
    edges = tuple(CostedEdge(source=f"n{i}", target=f"n{i + 1}", size_bytes=1e12) for i in range(2))
    cluster = Cluster(classes=(DeviceClass(name="gpu", kind="gpu", devices_per_host=4, within_bytes_per_s=1e9),))
    plan = plan_pipeline(CostedGraph(nodes=nodes, edges=edges), cluster)
    assert [(stage.replicas, len(stage.nodes)) for stage in plan.stages] == [(1, 3)]


def test_classes_one_after_the_other_where_their_product_is_too_large() -> None:
    nodes = tuple(CostedNode(name=f"n{i}", forward_s=1.0, memory_bytes=1.0) for i in range(30))
    classes = tuple(
        DeviceClass(name=name, kind=name, devices_per_host=64, memory_bytes=4.0, speed=speed)
        for name, speed in (("a", 1.0), ("b", 2.0), ("c", 4.0), ("d", 8.0))
    )
    graph, cluster = CostedGraph(nodes=nodes), Cluster(classes=classes)
    plan = plan_pipeline(graph, cluster, rules=Rules(micro_batches=64), objective="bottleneck")
    check_plan(graph, cluster, plan)
    assert plan.bound <= plan.value <= 2.5 * plan.bound


def test_an_option_of_one_kind_leaves_other_kinds_their_ways() -> None:
    only_on_b = NodeOption(name="remat", forward_s={"b": 9.0})
    graph = CostedGraph(nodes=(CostedNode(name="n", forward_s=2.0, options=(only_on_b,)),))
    a, b = DeviceClass(name="a", kind="a"), DeviceClass(name="b", kind="b")
    for classes in ((a,), (a, b)):
        plan = plan_pipeline(graph, Cluster(classes=classes), rules=Rules(micro_batches=1))
        assert plan.value == plan.stages[0].once_s == 2.0 and plan.bound == pytest.approx(2.0)


def test_a_node_that_runs_with_an_option_only() -> None:
    option = NodeOption(name="other", forward_s={"b": 3.0})
    graph = CostedGraph(nodes=(CostedNode(name="n", forward_s={"a": 18.0}, options=(option,)),))
    classes = tuple(DeviceClass(name=name, kind=name) for name in "ab")
    plan = plan_pipeline(graph, Cluster(classes=classes), rules=Rules(micro_batches=1))
    assert plan.value == 3.0 and plan.stages[0].options == {"n": "other"}


def test_a_tied_weight_crosses_a_border_once_and_its_gradients_each_time() -> None:
    nodes = tuple(CostedNode(name=name, forward_s=1.0) for name in ("embed", "head"))
    device = DeviceClass(name="gpu", kind="gpu", devices_per_host=2, within_bytes_per_s=100.0)

    def slowest(**what: Any) -> float:
        edge = CostedEdge(source="embed", target="head", size_bytes=8.0, **what)
        rules = Rules(micro_batches=4, max_replicas=1, num_stages=2)
        plan = plan_pipeline(
            CostedGraph(nodes=nodes, edges=(edge,)), Cluster(classes=(device,)), rules=rules, objective="bottleneck"
        )
        return plan.value - 1.0

    assert slowest() == pytest.approx(2 * 0.08)
    assert slowest(is_parameter=True) == pytest.approx((1 / 4 + 1) * 0.08)
    assert slowest(gradient_bytes=0.0) == pytest.approx(0.08)
