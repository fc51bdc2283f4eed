"""The best plan that fits, counting all that a stage holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from farspan.cluster import Cluster
from farspan.errors import PlanError
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
    so much less memory.
    """
    rules = Rules(micro_batches=num_micro_batches, max_replicas=1, num_stages=problem.hints.stages, least=problem.least)
    less = 0.0
    for _ in range(_MOST_SEARCHES):
        classes = tuple(replace(each, memory_bytes=max(0.0, each.memory_bytes - less)) for each in searched.classes)
        cluster = Cluster(classes=classes)
        pipeline = best_pipeline(problem.searched, cluster, rules)
        if pipeline is None:
            return None
        found = forecast(problem.graph, problem.cluster, pipeline, num_micro_batches)
        if found.fits:
            return Fitting(forecast=found, cluster=cluster, rules=rules)
        less += max(stage.memory_bytes - stage.limit_bytes for stage in found.stages)
    return None


def best_pipeline(graph: CostedGraph, cluster: Cluster, rules: Rules) -> Pipeline | None:
    """What is found; None where nothing fits."""
    try:
        return plan_pipeline(graph, cluster, rules=rules)
    except PlanError:
        return None
