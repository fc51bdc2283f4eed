"""The best plan that fits, counting all that a stage holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from farspan.cluster import Cluster
from farspan.errors import PlanError
from farspan.planner.answer.moves import Judge
from farspan.planner.answer.orders import Orders
from farspan.planner.costed import CostedGraph
from farspan.planner.forecast import Forecast, forecast
from farspan.planner.hinted import HintedProblem
from farspan.planner.pipeline import Pipeline, plan_pipeline
from farspan.planner.search.stages import Rules

__all__ = ["Fitting", "best_pipeline", "fitting"]

_MOST_SEARCHES = 4
"""With less memory each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """A plan that fits.

    Attributes:
        forecast: The plan.
        cluster: What the search was told of the devices: perhaps less memory than they have.
        rules: What it was told of the step.
    """

    forecast: Forecast
    cluster: Cluster
    rules: Rules


def fitting(problem: HintedProblem, searched: Cluster, num_micro_batches: int) -> Fitting | None:
    """The best plan for the devices in `searched`, by the objective of the search; None where none fits.

    The search counts neither what a piece needs while it runs nor what is sent: where that is too much, it is told of
    so much less memory of such devices.
    """
    rules = Rules(micro_batches=num_micro_batches, max_replicas=1, num_stages=problem.hints.stages, least=problem.least)
    less = dict.fromkeys((each.name for each in searched.classes), 0.0)
    for _ in range(_MOST_SEARCHES):
        classes = tuple(
            replace(each, memory_bytes=max(0.0, each.memory_bytes - less[each.name])) for each in searched.classes
        )
        cluster = Cluster(classes=classes)
        pipeline = best_pipeline(problem.searched, cluster, rules)
        if pipeline is None:
            break
        found = forecast(problem.graph, problem.cluster, pipeline, num_micro_batches)
        if found.fits:
            return Fitting(forecast=found, cluster=cluster, rules=rules)
        for name in less:
            own = (
                each for each, stage in zip(found.stages, pipeline.stages, strict=True) if stage.device_class == name
            )
            less[name] += max([0.0, *(stage.memory_bytes - stage.limit_bytes for stage in own)])
    return _first_that_fits(problem, searched, rules)


def _first_that_fits(problem: HintedProblem, searched: Cluster, rules: Rules) -> Fitting | None:
    orders, judge = Orders(problem.searched, searched, rules), Judge(problem, rules.micro_batches)
    for order in orders.plain():
        for pipeline in orders.cuts(order):
            found = judge.better(pipeline, math.inf)
            if found is not None:
                return Fitting(forecast=found, cluster=searched, rules=rules)
        if judge.is_done():
            break
    return None


def best_pipeline(graph: CostedGraph, cluster: Cluster, rules: Rules) -> Pipeline | None:
    """What is found; None where nothing fits."""
    try:
        return plan_pipeline(graph, cluster, rules=rules)
    except PlanError:
        return None
