"""Transfers are priced by the two devices that they are between: several hosts against trying all, device by device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planner.placement.brute_force import all_chains

from farspan.cluster import Cluster, DeviceClass
from farspan.errors import PlanError
from farspan.planner import Rules, place, plan_pipeline
from farspan.planner.answer import best_plan
from farspan.planner.costed import CostedEdge, CostedGraph, CostedNode

CLOSE = 1 + 1e-6
MICRO_BATCHES = 3


def hosts(count: int, devices: int, *, name: str = "gpu", **more: Any) -> DeviceClass:
    return DeviceClass(name=name, kind=name, num_hosts=count, devices_per_host=devices, **more)


def row(*seconds: float, size_bytes: float = 1.0) -> CostedGraph:
    nodes = tuple(CostedNode(name=f"n{i}", forward_s=each) for i, each in enumerate(seconds))
    pairs = itertools.pairwise(nodes)
    return CostedGraph(
        nodes=nodes, edges=tuple(CostedEdge(source=a.name, target=b.name, size_bytes=size_bytes) for a, b in pairs)
    )


TWO_BY_TWO = Cluster(classes=(hosts(2, 2, within_bytes_per_s=200.0, between_bytes_per_s=0.1),))


def test_one_of_two_hosts_where_the_link_between_them_is_slow() -> None:
    graph = row(1.0, 1.0)
    for contiguous in (True, False):
        placed = place(graph, TWO_BY_TWO, contiguous=contiguous, seconds=1.0)
        assert placed.value == pytest.approx(1.005) and placed.bound <= 1.005 * CLOSE
    rules = Rules(micro_batches=1, passes=1.0, max_replicas=1)
    pipeline = plan_pipeline(graph, TWO_BY_TWO, rules=rules, objective="bottleneck")
    assert pipeline.value == pytest.approx(1.005) and pipeline.bound <= 1.005 * CLOSE
    answer = best_plan(row(0.01, 0.01, size_bytes=0.001), TWO_BY_TWO, 8)
    assert len(answer.best.stages) == 2 and answer.best.step_s < 0.1


@st.composite
def problems(draw: st.DrawFn) -> tuple[CostedGraph, Cluster]:
    count = draw(st.integers(1, 4))
    seconds = st.sampled_from([0.0, 1.0, 2.0, 3.0])
    nodes = tuple(
        CostedNode(name=f"n{i}", forward_s=draw(seconds), memory_bytes=draw(st.integers(0, 3))) for i in range(count)
    )
    sizes = [draw(st.sampled_from([0.0, 1.0, 4.0])) for _ in nodes]
    pairs = [pair for pair in itertools.combinations(range(count), 2) if draw(st.booleans())]
    edges = tuple(CostedEdge(source=f"n{a}", target=f"n{b}", size_bytes=sizes[a]) for a, b in pairs)
    shapes = draw(st.sampled_from([[(2, 2)], [(2, 1)], [(1, 2), (1, 2)], [(1, 3)], [(2, 2), (1, 1)]]))
    links = st.sampled_from([0.5, 2.0, 8.0])
    classes = tuple(
        hosts(
            *shape,
            name=name,
            speed=draw(st.sampled_from([1.0, 2.0])),
            memory_bytes=draw(st.sampled_from([4.0, math.inf])),
            within_bytes_per_s=draw(links),
            between_bytes_per_s=draw(links),
        )
        for name, shape in zip("ab", shapes, strict=False)
    )
    return CostedGraph(nodes=nodes, edges=edges), Cluster(classes=classes)


def all_onces(graph: CostedGraph, cluster: Cluster, passes: float) -> Iterator[list[float]]:
    """Of every row of stages on every choice of devices, the seconds of one micro-batch in each stage."""
    devices = [
        (kind, (kind.name, number // kind.devices_per_host))
        for kind in cluster.classes
        for number in range(kind.num_devices)
    ]
    nodes = {node.name: node for node in graph.nodes}
    for chain in all_chains(graph):
        stage_of = {name: number for number, stage in enumerate(chain) for name in stage}
        for chosen in itertools.permutations(devices, len(chain)):
            onces = []
            for number, (stage, (kind, host)) in enumerate(zip(chain, chosen, strict=True)):
                if sum(nodes[name].memory_bytes for name in stage) > kind.memory_bytes:
                    break
                links: dict[str, tuple[float, float]] = {}
                for edge in graph.edges:
                    ends = (stage_of[edge.source], stage_of[edge.target])
                    if ends[0] != ends[1] and number in ends:
                        other_kind, other_host = chosen[ends[0] + ends[1] - number]
                        if cluster.num_hosts == 1 or host == other_host:
                            link = min(kind.within_bytes_per_s, other_kind.within_bytes_per_s)
                        else:
                            link = min(kind.between_bytes_per_s, other_kind.between_bytes_per_s)
                        links[edge.source] = (edge.size_bytes, min(link, links.get(edge.source, (0, link))[1]))
                own = sum(float(nodes[name].forward_s) for name in stage) / kind.speed  # type: ignore[arg-type]
                onces.append(own + passes * sum(size / link for size, link in links.values()))
            else:
                yield onces


def check(problem: tuple[CostedGraph, Cluster], objective: Literal["bottleneck", "step-time"], passes: float) -> None:
    graph, cluster = problem
    rules = Rules(micro_batches=MICRO_BATCHES, max_replicas=1, passes=passes)
    times = [
        max(onces) if objective == "bottleneck" else sum(onces) + (MICRO_BATCHES - 1) * max(onces)
        for onces in all_onces(graph, cluster, passes)
    ]
    try:
        plan = plan_pipeline(graph, cluster, rules=rules, objective=objective)
    except PlanError:
        assert not times
        return
    assert plan.bound <= min(times) * CLOSE
    assert min(times) <= plan.value * CLOSE
    assert any(plan.value == pytest.approx(each) for each in times)


EVERY: dict[str, Any] = {
    "problem": problems(),
    "objective": st.sampled_from(["bottleneck", "step-time"]),
    "passes": st.sampled_from([1.0, 2.0]),
}


@settings(max_examples=100, deadline=None)
@given(**EVERY)
def test_no_pipeline_is_below_the_bound_and_none_is_refused(problem, objective, passes) -> None:
    check(problem, objective, passes)


@pytest.mark.slow
@settings(max_examples=2_000, deadline=None)
@given(**EVERY)
def test_so_it_is_with_two_thousand(problem, objective, passes) -> None:
    check(problem, objective, passes)
