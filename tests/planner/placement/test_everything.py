"""All that a pipeline may have at once, against trying all: hosts, unequal classes, ways by kind, ties, memory.

Transfers are priced by the two devices that they are between.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planner.placement.brute_force import all_chains

from farspan.cluster import Cluster, DeviceClass
from farspan.errors import PlanError
from farspan.planner import Rules, plan_pipeline
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode, NodeOption
from farspan.planner.cost_model.costed_graph import Seconds

CLOSE = 1 + 1e-6


@st.composite
def graphs(draw: st.DrawFn) -> CostedGraph:
    count = draw(st.integers(1, 4))
    costs = st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0])
    bytes_ = st.sampled_from([0.0, 1.0, 2.0, 3.0])

    def seconds() -> Seconds:
        kinds = draw(st.sampled_from(["", "", "", "a", "b", "ab"]))
        return {kind: draw(costs) for kind in kinds} if kinds else draw(costs)

    nodes = tuple(
        CostedNode(
            name=f"n{number}",
            forward_s=seconds(),
            backward_s=draw(costs),
            memory_bytes=draw(bytes_),
            saved_bytes=draw(bytes_),
            working_bytes=draw(st.sampled_from([0.0, 0.0, 1.0, 2.0])),
            options=tuple(
                NodeOption(
                    name=f"remat{option}", forward_s=seconds(), memory_bytes=draw(bytes_), saved_bytes=draw(bytes_)
                )
                for option in range(draw(st.integers(0, 2)))
            ),
        )
        for number in range(count)
    )
    edges: list[CostedEdge] = []
    for number in range(count):
        one: dict[str, Any] = {
            "size_bytes": draw(st.sampled_from([0.0, 1.0, 4.0])),
            "is_parameter": draw(st.sampled_from([False, False, True])),
            "gradient_bytes": draw(st.sampled_from([None, None, 0.0])),
        }
        targets = [target for target in range(number + 1, count) if draw(st.booleans())]
        edges += [CostedEdge(source=f"n{number}", target=f"n{target}", **one) for target in targets]
    return CostedGraph(nodes=nodes, edges=tuple(edges))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    shapes = draw(st.sampled_from([[(1, 1)], [(1, 3)], [(2, 1)], [(2, 2)], [(1, 2), (1, 2)], [(2, 1), (1, 2)]]))
    links = st.sampled_from([0.5, 2.0, 8.0])
    return Cluster(
        classes=tuple(
            DeviceClass(
                name=name,
                kind=name,
                num_hosts=num_hosts,
                devices_per_host=devices,
                speed=draw(st.sampled_from([1.0, 2.0])),
                memory_bytes=draw(st.sampled_from([3.0, 6.0, 9.0, math.inf])),
                within_bytes_per_s=draw(links),
                between_bytes_per_s=draw(links),
            )
            for name, (num_hosts, devices) in zip("ab", shapes, strict=False)
        )
    )


def on(kind: DeviceClass, given: Seconds) -> float:
    return given.get(kind.name, math.inf) if isinstance(given, Mapping) else given / kind.speed


def least_seconds(graph: CostedGraph, names: list[str], kind: DeviceClass, in_flight: int) -> float:
    """Of one micro-batch on one device, by the best way to run each node; infinite where none fits."""
    best = math.inf
    working = max(node.working_bytes for node in graph.nodes if node.name in names)
    for ways in itertools.product(*((node, *node.options) for node in graph.nodes if node.name in names)):
        if sum(way.memory_bytes + in_flight * way.saved_bytes for way in ways) + working <= kind.memory_bytes:
            best = min(best, sum(on(kind, way.forward_s) + on(kind, way.backward_s) for way in ways))
    return best


def all_onces(graph: CostedGraph, cluster: Cluster, micro_batches: int, passes: float) -> Iterator[list[float]]:
    """Of every chain of stages on every choice of devices, the seconds of one micro-batch in each stage."""
    devices = [
        (kind, (kind.name, number // kind.devices_per_host))
        for kind in cluster.classes
        for number in range(kind.num_devices)
    ]
    for chain in all_chains(graph):
        stage_of = {name: number for number, stage in enumerate(chain) for name in stage}
        own = {
            (number, kind.name): least_seconds(graph, stage, kind, min(len(chain) - number, micro_batches))
            for number, stage in enumerate(chain)
            for kind in cluster.classes
        }
        for chosen in itertools.permutations(devices, len(chain)):
            onces = [own[number, kind.name] for number, (kind, _) in enumerate(chosen)]
            if math.inf in onces:
                continue
            for source in {edge.source for edge in graph.edges}:
                uses = [edge for edge in graph.edges if edge.source == source]
                home, times = stage_of[source], 1 / micro_batches if uses[0].is_parameter else 1.0
                times += 0.0 if uses[0].gradient_bytes == 0 else passes - 1.0
                slowest = 0.0
                for there in {stage_of[edge.target] for edge in uses} - {home}:
                    (one, one_host), (other, other_host) = chosen[home], chosen[there]
                    if cluster.num_hosts == 1 or one_host == other_host:
                        link = min(one.within_bytes_per_s, other.within_bytes_per_s)
                    else:
                        link = min(one.between_bytes_per_s, other.between_bytes_per_s)
                    onces[there] += times * uses[0].size_bytes / link
                    slowest = max(slowest, times * uses[0].size_bytes / link)
                onces[home] += slowest
            yield onces


def check(
    graph: CostedGraph,
    cluster: Cluster,
    micro_batches: int,
    objective: Literal["bottleneck", "step-time"],
    passes: float,
) -> None:
    times = [
        max(onces) if objective == "bottleneck" else sum(onces) + (micro_batches - 1) * max(onces)
        for onces in all_onces(graph, cluster, micro_batches, passes)
    ]
    rules = Rules(micro_batches=micro_batches, max_replicas=1, passes=passes)
    try:
        plan = plan_pipeline(graph, cluster, rules=rules, objective=objective)
    except PlanError:
        assert not times
        return
    assert plan.bound <= min(times) * CLOSE
    assert any(plan.value == pytest.approx(each) for each in times)
    if cluster.num_hosts == 1 and objective == "bottleneck":
        assert plan.value == pytest.approx(min(times))


EVERY: dict[str, Any] = {
    "graph": graphs(),
    "cluster": clusters(),
    "micro_batches": st.sampled_from([1, 2, 4]),
    "objective": st.sampled_from(["bottleneck", "step-time"]),
    "passes": st.sampled_from([1.0, 2.0]),
}


@settings(max_examples=100, deadline=None)
@given(**EVERY)
def test_what_is_found_is_there_and_nothing_is_below_the_bound(
    graph, cluster, micro_batches, objective, passes
) -> None:
    check(graph, cluster, micro_batches, objective, passes)


@settings(max_examples=2_000, deadline=None)
@given(**EVERY)
def test_so_it_is_with_two_thousand(graph, cluster, micro_batches, objective, passes) -> None:
    check(graph, cluster, micro_batches, objective, passes)
