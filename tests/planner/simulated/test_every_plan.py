"""The plan for the user's cluster against every plan that there is, each simulated: none is below the bound, and where
one fits, one is found. With hints too that say how many stages there are, and what is computed again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planner.placement.brute_force import all_chains

from farspan.cluster import Cluster, DeviceClass
from farspan.errors import PlanError
from farspan.planner import Hints
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode, NodeOption
from farspan.planner.optimize import best_plan
from farspan.planner.pipeline import Pipeline, PipelineStage
from farspan.planner.prediction import Prediction, predict_step

CLOSE = 1 + 1e-6
SCHEDULES = (("auto", "1f1b"), ("zero-bubble",))
"""Those that the planner compares, and one that a user may ask for."""


@st.composite
def graphs(draw: st.DrawFn) -> CostedGraph:
    count = draw(st.integers(1, 4))
    seconds, sizes = st.sampled_from([1.0, 2.0, 3.0]), st.sampled_from([0.0, 1.0, 2.0, 3.0])
    nodes: list[CostedNode] = []
    for number in range(count):
        forward_s, saved = draw(seconds), draw(sizes)
        forward_working = draw(st.sampled_from([0.0, 0.0, 1.0]))
        backward_s = forward_s + draw(seconds)
        if draw(st.integers(0, 4)) == 0:
            forward_s = backward_s = 0.0
        remat = NodeOption(
            name="remat",
            forward_s=forward_s,
            backward_s=backward_s + draw(seconds),
            memory_bytes=1.0,
            saved_bytes=saved * draw(st.sampled_from([0.0, 0.5])),
        )
        nodes.append(
            CostedNode(
                name=f"n{number}",
                forward_s=forward_s,
                backward_s=backward_s,
                weight_s=forward_s * draw(st.sampled_from([0.0, 1.0])),
                weight_flops=draw(st.sampled_from([0.0, 1e15])),
                memory_bytes=1.0,
                parameter_bytes=draw(st.sampled_from([0.0, 1.0])),
                saved_bytes=saved,
                working_bytes=max(forward_working, draw(st.sampled_from([0.0, 0.0, 1.0, 3.0]))),
                forward_working_bytes=forward_working,
                options=(remat,) if draw(st.booleans()) else (),
            )
        )
    edges: list[CostedEdge] = []
    for number in range(count - 1):
        size_bytes = draw(st.sampled_from([0.0, 0.5, 1.0]))
        gradient_bytes = draw(st.sampled_from([None, None, None, 0.0]))
        targets = [number + 1, *(target for target in range(number + 2, count) if draw(st.integers(0, 3)) == 0)]
        edges += [
            CostedEdge(source=f"n{number}", target=f"n{target}", size_bytes=size_bytes, gradient_bytes=gradient_bytes)
            for target in targets[draw(st.sampled_from([0, 0, 0, 1])) :]
        ]
    return CostedGraph(nodes=tuple(nodes), edges=tuple(edges))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    counts = draw(st.sampled_from([(1,), (2,), (3,), (1, 1), (2, 1)]))
    return Cluster(
        classes=tuple(
            DeviceClass(
                name=name,
                kind=name,
                devices_per_host=count,
                memory_bytes=draw(st.sampled_from([4.0, 6.0, 8.0, 12.0, math.inf])),
                speed=draw(st.sampled_from([1.0, 2.0, 8.0])),
                latency_s=draw(st.sampled_from([0.0, 0.0, 1.0])),
                within_bytes_per_s=draw(st.sampled_from([1.0, 10.0])),
                between_bytes_per_s=draw(st.sampled_from([1.0, 10.0])),
            )
            for name, count in zip("ab", counts, strict=False)
        )
    )


@st.composite
def some_hints(draw: st.DrawFn) -> Hints:
    names = [f"n{number}" for number in range(4)]
    remat = draw(st.sampled_from([None, None, None, False, True, "some"]))
    if remat == "some":
        remat = tuple(name for name in names if draw(st.booleans()))
    return Hints(stages=draw(st.sampled_from([None, None, None, 1, 2, 3])), remat=remat)


def ways_of(node: CostedNode, hints: Hints) -> tuple[str, ...]:
    """How hints let a node be run."""
    if hints.remat is None:
        return node.names_of_ways
    is_again = hints.remat if isinstance(hints.remat, bool) else node.name in hints.remat
    return node.names_of_ways[-1:] if is_again else ("",)


def every_plan(graph: CostedGraph, cluster: Cluster, num_micro_batches: int, hints: Hints) -> Iterator[Prediction]:
    devices = [each.name for each in cluster.classes for _ in range(each.num_devices)]
    for chain in all_chains(graph):
        if hints.stages not in (None, len(chain)):
            continue
        for order in sorted(set(itertools.permutations(devices, len(chain)))):
            for ways in itertools.product(*(ways_of(node, hints) for node in graph.nodes)):
                way_of = dict(zip([node.name for node in graph.nodes], ways, strict=True))
                stages = tuple(
                    PipelineStage(
                        device_class=kind,
                        nodes=tuple(names),
                        options={name: way_of[name] for name in names if way_of[name]},
                    )
                    for kind, names in zip(order, chain, strict=True)
                )
                for schedules in SCHEDULES:
                    yield predict_step(graph, cluster, Pipeline(stages=stages), num_micro_batches, schedules=schedules)


def check(graph: CostedGraph, cluster: Cluster, num_micro_batches: int, hints: Hints) -> None:
    if not isinstance(hints.remat, bool | None):
        names = {node.name for node in graph.nodes}
        hints = replace(hints, remat=tuple(name for name in hints.remat if name in names))
    fitting = [each for each in every_plan(graph, cluster, num_micro_batches, hints) if each.fits]
    steps = [each.step_s for each in fitting if each.plan.schedule in SCHEDULES[0]]
    try:
        result = best_plan(graph, cluster, num_micro_batches, hints=hints)
    except PlanError:
        assert not steps
        return
    assert result.bound <= min(each.step_s for each in fitting) * CLOSE
    assert any(result.best.step_s == pytest.approx(each) for each in steps)


EVERY: dict[str, Any] = {
    "graph": graphs(),
    "cluster": clusters(),
    "num_micro_batches": st.sampled_from([1, 2, 4]),
    "hints": st.one_of(st.just(Hints()), some_hints()),
}


@settings(max_examples=30, deadline=None)
@given(**EVERY)
def test_no_plan_is_below_the_bound_and_none_is_refused(graph, cluster, num_micro_batches, hints) -> None:
    check(graph, cluster, num_micro_batches, hints)


@pytest.mark.timeout(1800)
@settings(max_examples=2_000, deadline=None)
@given(**EVERY)
def test_so_it_is_with_two_thousand(graph, cluster, num_micro_batches, hints) -> None:
    check(graph, cluster, num_micro_batches, hints)
