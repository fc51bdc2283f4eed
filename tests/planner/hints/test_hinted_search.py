"""Plans under hints against trying all: small random graphs, pins, groups, memory and numbers of stages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planner.placement.brute_force import all_chains

from farspan.cluster import Cluster, DeviceClass
from farspan.errors import PlanError
from farspan.planner import Hints, Pipeline, Rules, plan_pipeline
from farspan.planner.constraints import hinted_problem
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode
from farspan.planner.optimize import Prediction, best_plan, predict_step
from farspan.planner.pipeline import PipelineStage

CLOSE = 1 + 1e-6
MICRO_BATCHES = 3


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is drawn."""

    graph: CostedGraph
    cluster: Cluster
    hints: Hints

    def kinds(self) -> list[DeviceClass]:
        """By rank, with the memory that hints leave it."""
        found = [each for each in self.cluster.classes for _ in range(each.num_devices)]
        limits = [self.hints.memory_of(rank) for rank in range(len(found))]
        return [
            replace(kind, memory_bytes=min(kind.memory_bytes, math.inf if limit is None else limit))
            for kind, limit in zip(found, limits, strict=True)
        ]

    def breaks(self, stages: dict[int, list[str]]) -> str:
        """Which hint a placement breaks, by rank the nodes; empty if none, memory aside."""
        rank_of = {name: rank for rank, nodes in stages.items() for name in nodes}
        for name, place in self.hints.pins.items():
            if f"rank:{rank_of[name]}" != place:
                return f"{name} pinned to {place}"
        for group in self.hints.together:
            if len({rank_of[name] for name in group}) > 1:
                return f"together {group}"
        if self.hints.stages not in (None, len(stages)):
            return f"{self.hints.stages} stages"
        last = max((int(place[5:]) for place in self.hints.pins.values()), default=-1)
        return "" if set(range(last + 1)) <= set(stages) else "a rank before a pinned one"


@st.composite
def problems(draw: st.DrawFn, *, most_nodes: int = 5) -> Problem:
    count = draw(st.integers(2, most_nodes))
    names = [f"n{i}" for i in range(count)]
    seconds = st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0])
    nodes = tuple(
        CostedNode(
            name=name,
            forward_s=draw(seconds),
            memory_bytes=draw(st.integers(0, 4)),
            saved_bytes=draw(st.integers(0, 1)),
        )
        for name in names
    )
    pairs = [pair for pair in itertools.combinations(names, 2) if draw(st.integers(0, 2))]
    edges = tuple(CostedEdge(source=a, target=b, time_s=0.0) for a, b in pairs)
    first, second = draw(st.sampled_from([(3, 0), (1, 2), (2, 1), (2, 0), (4, 0)]))
    classes = tuple(
        DeviceClass(name=name, kind=name, devices_per_host=devices, speed=speed, memory_bytes=memory)
        for name, devices, speed in (("a", first, 1.0), ("b", second, 2.0))
        if devices
        for memory in [draw(st.sampled_from([8.0, math.inf]))]
    )
    cluster = Cluster(classes=classes)
    ranks = st.integers(0, cluster.num_devices - 1)
    pins = {name: f"rank:{draw(ranks)}" for name in names if not draw(st.integers(0, 3))}
    groups = [names[: draw(st.integers(2, 3))]] if not draw(st.integers(0, 3)) else []
    if not draw(st.integers(0, 3)):
        groups.append([names[0], names[-1]])
    memory = draw(st.sampled_from([None, None, 9.0, {"rank:0": 3.0}, {"rank:1": 5.0}]))
    stages = draw(st.sampled_from([None, None, 1, 2, 3]))
    return Problem(
        graph=CostedGraph(nodes=nodes, edges=edges),
        cluster=cluster,
        hints=Hints(pins=pins, together=groups, max_memory=memory, stages=stages),
    )


def rows(problem: Problem) -> Iterator[dict[int, list[str]]]:
    """All rows of stages that keep the hints, by rank the nodes in the order of the stages."""
    for chain in all_chains(problem.graph):
        for ranks in itertools.permutations(range(len(problem.kinds())), len(chain)):
            stages = dict(zip(ranks, chain, strict=True))
            if not problem.breaks(stages):
                yield stages


def fitting_rows(problem: Problem) -> Iterator[dict[int, list[str]]]:
    """Those that fit, if as many micro-batches are in flight as stages follow."""
    kinds = problem.kinds()
    nodes_of = {node.name: node for node in problem.graph.nodes}
    for stages in rows(problem):
        held = [
            sum(
                nodes_of[name].memory_bytes + min(len(stages) - number, MICRO_BATCHES) * nodes_of[name].saved_bytes
                for name in nodes
            )
            for number, nodes in enumerate(stages.values())
        ]
        if all(size <= kinds[rank].memory_bytes for rank, size in zip(stages, held, strict=True)):
            yield stages


def seconds_of(problem: Problem, stages: dict[int, list[str]]) -> list[float]:
    kinds = problem.kinds()
    forward = {node.name: float(node.forward_s) for node in problem.graph.nodes}  # type: ignore[arg-type]
    return [sum(forward[name] for name in nodes) / kinds[rank].speed for rank, nodes in stages.items()]


@settings(max_examples=200, deadline=None)
@given(problem=problems())
def test_the_slowest_stage_is_the_best_of_all_that_keep_the_hints(problem: Problem) -> None:
    found = list(fitting_rows(problem))
    best = min((max(seconds_of(problem, stages)) for stages in found), default=math.inf)
    try:
        hinted = hinted_problem(problem.graph, problem.cluster, problem.hints)
        rules = Rules(micro_batches=MICRO_BATCHES, max_replicas=1, num_stages=hinted.hints.stages, least=hinted.least)
        plan = plan_pipeline(hinted.searched, hinted.cluster, rules=rules, objective="bottleneck")
    except PlanError:
        assert not found
        return
    if hinted.is_chain:
        assert plan.value <= best * CLOSE
        assert best <= plan.value * CLOSE and plan.bound <= best * CLOSE
        step = plan_pipeline(hinted.searched, hinted.cluster, rules=rules)
        times = [seconds_of(problem, stages) for stages in found]
        fastest = min(sum(each) + (MICRO_BATCHES - 1) * max(each) for each in times)
        assert step.bound <= fastest * CLOSE and fastest <= step.value * CLOSE


@settings(max_examples=100, deadline=None)
@given(problem=problems(most_nodes=4))
def test_no_hint_is_broken_and_no_plan_that_keeps_them_beats_the_bound(problem: Problem) -> None:
    try:
        result = best_plan(problem.graph, problem.cluster, MICRO_BATCHES, hints=problem.hints)
    except PlanError:
        assert not any(prediction_of(problem, each).fits for each in rows(problem))
        return
    best = result.best
    stages = {best.plan.rank_of(number): list(stage.nodes) for number, stage in enumerate(best.stages)}
    assert all(stages.values()) and set(stages) == set(range(len(stages)))
    assert best.fits and not problem.breaks(stages), problem.breaks(stages)
    if problem.hints.pins:
        assert all(
            stage.limit_bytes == problem.kinds()[best.plan.rank_of(number)].memory_bytes
            for number, stage in enumerate(best.stages)
            if best.plan.rank_of(number) < result.problem.num_named
        )
    simulated = [prediction_of(problem, each) for each in rows(problem)]
    assert result.bound <= min([best.step_s, *(each.step_s for each in simulated if each.fits)]) * CLOSE


def prediction_of(problem: Problem, stages: dict[int, list[str]]) -> Prediction:
    """The step of a chain of stages, simulated on devices that are each of a class of its own."""
    kinds = [replace(kind, name=str(rank), devices_per_host=1) for rank, kind in enumerate(problem.kinds())]
    row = tuple(PipelineStage(device_class=str(rank), nodes=tuple(nodes)) for rank, nodes in stages.items())
    return predict_step(problem.graph, Cluster(classes=tuple(kinds)), Pipeline(stages=row), MICRO_BATCHES)
