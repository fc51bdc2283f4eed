"""The plan that is found against all that there are, each simulated; and no plan under any schedule beats the bound."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.planner.given import predict_stages

from farspan.cluster import Cluster, DeviceClass
from farspan.planner.bound import bound_of
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode
from farspan.planner.optimize import best_plan, predict_step

SCHEDULES = ("auto", "1f1b", "zero-bubble", "gpipe")
COUNTS = ((2,), (3,), (1, 1), (2, 1), (1, 2), (1, 1, 1))
Stages = list[tuple[str, list[str]]]


def a_chain(seed: int) -> tuple[CostedGraph, Cluster, int]:
    """Units of which some have weight gradients to defer, on devices and links of several speeds."""
    rng = random.Random(seed)
    nodes: list[CostedNode] = []
    for number in range(rng.choice((4, 5, 6))):
        forward = rng.choice((0.1, 1.0, 1.0, 1.0, 2.0)) * rng.uniform(0.8, 1.2)
        weight = rng.choice((0.0, 1.0, 1.0, 0.7)) * forward
        nodes.append(
            CostedNode(
                name=f"n{number}",
                forward_s=forward,
                backward_s=forward * rng.uniform(0.8, 1.2) + weight,
                weight_s=weight,
                weight_flops=1e15 if weight else 0.0,
                parameter_bytes=1e6 if weight else 0.0,
                saved_bytes=1e6,
            )
        )
    edges = [
        CostedEdge(source=a.name, target=b.name, size_bytes=rng.choice((0.0, 1e6, 1e7)))
        for a, b in itertools.pairwise(nodes)
    ]
    counts, bandwidth = rng.choice(COUNTS), rng.choice((1e7, 1e8, 1e9))
    classes = [
        DeviceClass(
            name=f"c{number}",
            kind="gpu",
            devices_per_host=count,
            speed=speed,
            within_bytes_per_s=bandwidth,
            between_bytes_per_s=bandwidth,
        )
        for number, (count, speed) in enumerate(zip(counts, rng.sample((1.0, 0.5, 0.7, 0.4), 3), strict=False))
    ]
    return CostedGraph(nodes=tuple(nodes), edges=tuple(edges)), Cluster(classes=tuple(classes)), rng.choice((2, 4, 8))


def all_plans(graph: CostedGraph, cluster: Cluster) -> Iterator[Stages]:
    """Every cut of a chain, on every choice of devices in every order."""
    names = [node.name for node in graph.nodes]
    devices = [each.name for each in cluster.classes for _ in range(each.num_devices)]
    for count in range(1, len(devices) + 1):
        for order in sorted(set(itertools.permutations(devices, count))):
            for cuts in itertools.combinations(range(1, len(names)), count - 1):
                ends = itertools.pairwise((0, *cuts, len(names)))
                yield [(device, names[a:b]) for device, (a, b) in zip(order, ends, strict=True)]


@pytest.mark.parametrize("seed", range(48))
def test_no_plan_is_played_to_be_faster_than_the_one_found(seed: int) -> None:
    graph, cluster, micro_batches = a_chain(seed)
    result = best_plan(graph, cluster, micro_batches)
    best = min(predict_stages(graph, cluster, stages, micro_batches).step_s for stages in all_plans(graph, cluster))
    assert result.best.step_s <= best * 1.000001
    assert result.best.plan.stages == tuple(stage.where for stage in result.best.stages)


@pytest.mark.parametrize("seed", range(48, 72))
def test_no_plan_under_any_schedule_beats_the_bound(seed: int) -> None:
    graph, cluster, micro_batches = a_chain(seed)
    steps = [
        predict_step(graph, cluster, one.pipeline, micro_batches, schedules=[schedule]).step_s
        for one in (predict_stages(graph, cluster, stages, micro_batches) for stages in all_plans(graph, cluster))
        for schedule in SCHEDULES
    ]
    bound = bound_of(graph, cluster, micro_batches)
    assert bound.seconds <= min(steps)
    allowed = bound.devices_within(min(steps))
    assert allowed and all(allowed.count(each.name) <= each.num_devices for each in cluster.classes)


@pytest.mark.parametrize("seed", range(48, 72))
def test_nor_the_bound_that_is_known_once_a_plan_is_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are too many cuts to look at at once: as close as there, to a percent, and still below all steps."""
    graph, cluster, micro_batches = a_chain(seed)
    at_once = bound_of(graph, cluster, micro_batches).seconds
    monkeypatch.setattr("farspan.planner.bound.lower_bound._WORK_AT_ONCE", 0)
    bound = bound_of(graph, cluster, micro_batches)
    best_s = best_plan(graph, cluster, micro_batches).best.step_s
    assert bound.seconds <= bound.below(best_s) <= best_s
    assert at_once / 1.01 <= bound.below(best_s) * (1 + 1e-8) and bound.below(best_s) <= at_once * (1 + 1e-8)


def test_on_many_devices_the_bound_knows_what_the_others_are_on() -> None:
    """50 nodes on 18 devices of 3 classes: were all stages but one on the fastest devices, they would wait less."""
    draws = random.Random(0)
    seconds = [draws.uniform(0.5, 1.5) for _ in range(50)]
    nodes = tuple(
        CostedNode(name=f"n{i}", forward_s=s, backward_s=2 * s, weight_s=s, weight_flops=1e15, parameter_bytes=1.0)
        for i, s in enumerate(seconds)
    )
    edges = tuple(CostedEdge(source=a.name, target=b.name) for a, b in itertools.pairwise(nodes))
    classes = tuple(
        DeviceClass(name=name, kind=name, devices_per_host=6, speed=speed)
        for name, speed in zip("abc", (1.0, 2.0, 3.0), strict=True)
    )
    graph, cluster = CostedGraph(nodes=nodes, edges=edges), Cluster(classes=classes)
    bound, result = bound_of(graph, cluster, 16), best_plan(graph, cluster, 16)
    assert bound.cuts is not None, "the cuts are too many to look at at once"
    assert bound.seconds * 1.05 < result.bound <= result.best.step_s


def test_weight_gradients_that_are_put_off_keep_nobody_waiting() -> None:
    """The second stage does them while the first one goes back: less than if stages waited for whole backwards."""
    nodes = tuple(
        CostedNode(name=name, forward_s=1.0, backward_s=2.0, weight_s=1.0, weight_flops=1e15, parameter_bytes=1.0)
        for name in "ab"
    )
    graph = CostedGraph(nodes=nodes, edges=(CostedEdge(source="a", target="b"),))
    cluster = Cluster(classes=(DeviceClass(name="x", kind="x", devices_per_host=2),))
    best = best_plan(graph, cluster, 4).best
    assert best.plan.schedule == "auto" and best.step_s == pytest.approx(13.0)
    assert bound_of(graph, cluster, 4).seconds == pytest.approx(13.0)
    whole = replace(graph, nodes=tuple(replace(node, weight_s=0.0) for node in nodes))
    assert best_plan(whole, cluster, 4).best.step_s == pytest.approx(15.0)
    assert bound_of(whole, cluster, 4).seconds == pytest.approx(15.0)


def test_a_plan_is_found_where_memory_is_just_enough_as_it_is_played() -> None:
    """Given less memory, for what is sent, the search finds nothing; what is simulated fits."""
    nodes = tuple(
        CostedNode(name=f"n{i}", forward_s=1.0, backward_s=2.0, memory_bytes=size, saved_bytes=size)
        for i, size in enumerate((3.0, 1.0, 2.0, 3.0))
    )
    edges = tuple(CostedEdge(source=a.name, target=b.name, size_bytes=1.0) for a, b in itertools.pairwise(nodes))
    graph = CostedGraph(nodes=nodes, edges=edges)
    for memory in range(8, 24):
        kind = DeviceClass(name="x", kind="x", devices_per_host=2, memory_bytes=float(memory))
        cluster = Cluster(classes=(kind,))
        simulated = [predict_stages(graph, cluster, stages, 2) for stages in all_plans(graph, cluster)]
        best = min((each.step_s for each in simulated if each.fits), default=math.inf)
        if math.isfinite(best):
            assert best_plan(graph, cluster, 2).best.step_s <= best * 1.000001, memory
