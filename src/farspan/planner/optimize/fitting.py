"""The best plan that fits, counting all that a stage holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from farspan.cluster import Cluster, DeviceClass
from farspan.errors import PlanError
from farspan.planner.constraints import HintedProblem
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode
from farspan.planner.cost_model.colocation import seconds_on
from farspan.planner.optimize.every import can_be_listed, every_pipeline
from farspan.planner.optimize.moves import Judge
from farspan.planner.optimize.orders import Orders
from farspan.planner.partition_dp.stages import Rules
from farspan.planner.pipeline import Objective, Pipeline, PipelineStage, plan_pipeline
from farspan.planner.prediction import Prediction, predict_step

__all__ = ["Fitting", "best_pipeline", "fitting", "rules_of"]

_MOST_SEARCHES = 4
"""Limit on the searches, each with less memory than the one before."""
_MOST_CUTS = 4
"""Limit on the cuts of each order of devices."""
_MOST_TASKS = 20_000
"""Limit on the tasks of all steps that are simulated where the search finds nothing."""
_MOST_TASKS_OF_ALL = 100_000
"""The same for the list of all plans that there are."""
_SMALL = 100
"""Up to so many nodes times devices, the search is asked in more ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """What a search for a plan that fits has found.

    Attributes:
        best: The plan; None where none was found.
        is_certain: There is one, or there is proof that there is none.
        num_tasks: Work on what is hard to find, in simulated tasks.
    """

    best: Prediction | None
    is_certain: bool
    num_tasks: float = 0.0


def rules_of(problem: HintedProblem, num_micro_batches: int) -> Rules:
    """Returns the search's rules of a step: one device for each stage, and what the hints ask for."""
    return Rules(micro_batches=num_micro_batches, max_replicas=1, num_stages=problem.hints.stages, least=problem.least)


def fitting(problem: HintedProblem, searched: Cluster, num_micro_batches: int, *, is_question: bool = False) -> Fitting:
    """Searches the best plan for the devices in `searched`, by the objective of the search.

    Args:
        problem: What is run, and what hints ask for.
        searched: Where.
        num_micro_batches: Of a step.
        is_question: Whether the caller only asks if there is one: a plan that is hard to find is then not looked for.

    The memory that the search counts is an estimate. It is asked without what nodes need while they run, with it, and
    with one micro-batch in flight, as in stages that need nothing of each other. The simulated step decides.
    """
    rules = rules_of(problem, num_micro_batches)
    less = replace(rules, counts_working=False)
    first = _prediction_of(problem, searched, less)
    if first is not None and first.fits:
        return Fitting(best=first, is_certain=True)
    emptiest = _emptiest(problem, searched, rules)
    if emptiest is None or emptiest.bound > 1:
        return Fitting(best=None, is_certain=True)
    few_in_flight = [replace(each, most_in_flight=1) for each in (less, rules)]
    is_small = len(problem.graph.nodes) * searched.num_devices <= _SMALL
    for ways in ([less],) if is_question else ([less, rules], few_in_flight if is_small else []):
        found = [each for each in (_with_less_memory(problem, searched, way) for way in ways) if each is not None]
        if found:
            return Fitting(best=min(found, key=lambda each: each.step_s), is_certain=True)
    found = predict_step(problem.graph, problem.cluster, emptiest, num_micro_batches)
    if found.fits or is_question:
        return Fitting(best=found if found.fits else None, is_certain=found.fits)
    return _first_that_fits(problem, searched, less)


def _prediction_of(problem: HintedProblem, cluster: Cluster, rules: Rules) -> Prediction | None:
    """Simulates the best pipeline that the search finds; None where it finds none."""
    pipeline = best_pipeline(problem.searched, cluster, rules)
    return pipeline and predict_step(problem.graph, problem.cluster, pipeline, rules.micro_batches)


def _with_less_memory(problem: HintedProblem, searched: Cluster, rules: Rules) -> Prediction | None:
    """Searches again, with so much less memory for the devices of a class, while what is found exceeds one of them."""
    less = dict.fromkeys((each.name for each in searched.classes), 0.0)
    for _ in range(_MOST_SEARCHES):
        classes = tuple(
            replace(each, memory_bytes=max(0.0, each.memory_bytes - less[each.name])) for each in searched.classes
        )
        found = _prediction_of(problem, Cluster(classes=classes), rules)
        if found is None or found.fits:
            return found
        for name in less:
            own = (
                each
                for each, stage in zip(found.stages, found.pipeline.stages, strict=True)
                if stage.device_class == name
            )
            less[name] += max([0.0, *(stage.memory_bytes - stage.limit_bytes for stage in own)])
    return None


def _emptiest(problem: HintedProblem, searched: Cluster, rules: Rules) -> Pipeline | None:
    """Returns the plan in which the fullest device is the least full, with one micro-batch in flight. The search takes
    shares of memory for seconds; a bound above 1 is a proof that nothing fits.
    """

    def least(node: CostedNode, kind: DeviceClass) -> tuple[float, str]:
        ways = [(node.as_run(way), way) for way in node.names_of_ways]
        sizes = [(each.least_bytes, way) for each, way in ways if seconds_on(each, kind) < math.inf]
        return min(sizes, default=(math.inf, ""))

    def shares(node: CostedNode) -> dict[str, float]:
        sizes = {each.name: (least(node, each)[0], each.memory_bytes) for each in searched.classes}
        return {name: size / limit for name, (size, limit) in sizes.items() if size < math.inf and limit}

    graph = CostedGraph(
        nodes=tuple(
            CostedNode(name=node.name, forward_s=shares(node), together=node.together, devices=node.devices)
            for node in problem.searched.nodes
        ),
        edges=tuple(
            CostedEdge(source=source, target=target)
            for source, target in dict.fromkeys((edge.source, edge.target) for edge in problem.searched.edges)
        ),
    )
    kinds = {each.name: each for each in searched.classes}
    unlimited = tuple(replace(each, memory_bytes=math.inf, latency_s=0.0) for each in searched.classes)
    emptiest = best_pipeline(graph, Cluster(classes=unlimited), rules, objective="bottleneck")
    if emptiest is None:
        return None
    nodes = {node.name: node for node in problem.graph.nodes}
    stages: list[PipelineStage] = []
    for stage in emptiest.stages:
        ways = {name: least(nodes[name], kinds[stage.device_class])[1] for name in stage.nodes}
        stages.append(replace(stage, options={name: way for name, way in ways.items() if way}))
    return replace(emptiest, stages=tuple(stages))


def _first_that_fits(problem: HintedProblem, searched: Cluster, rules: Rules) -> Fitting:
    """Simulates the best cuts for some orders of devices, then all plans there are, until one fits.

    Where all are too many, each chain of stages follows with its nodes run in the way that keeps the least.
    """
    orders = Orders(problem.searched, searched, rules)
    some = (each for order in orders.plain() for each in itertools.islice(orders.cuts(order), _MOST_CUTS))
    judge = Judge(problem, rules.micro_batches, _MOST_TASKS)
    found, num_tasks, is_all = _first(some, judge), judge.num_tasks_used, False
    for emptiest_only in (False, True) if can_be_listed(problem.searched, searched) else ():
        if found is None and not is_all:
            judge = Judge(problem, rules.micro_batches, _MOST_TASKS_OF_ALL)
            every = every_pipeline(problem.searched, searched, rules, judge.charge, emptiest_only=emptiest_only)
            found = _first(every, judge)
            num_tasks += judge.num_tasks_used
            is_all = not emptiest_only and not judge.is_done()
    return Fitting(best=found, is_certain=found is not None or is_all, num_tasks=num_tasks)


def _first(pipelines: Iterable[Pipeline], judge: Judge) -> Prediction | None:
    """Returns the first that fits; None where none does, or the judge is done before."""
    for pipeline in pipelines:
        found = judge.better(pipeline, math.inf)
        if found is not None or judge.is_done():
            return found
    return None


def best_pipeline(
    graph: CostedGraph, cluster: Cluster, rules: Rules, *, objective: Objective = "step-time"
) -> Pipeline | None:
    """Returns the pipeline that the search finds; None where nothing fits."""
    try:
        return plan_pipeline(graph, cluster, rules=rules, objective=objective)
    except PlanError:
        return None
