"""The best plan that fits, counting all that a stage holds."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from farspan.cluster import Cluster
from farspan.errors import PlanError
from farspan.planner.answer.moves import Judge
from farspan.planner.answer.orders import Orders
from farspan.planner.costed import CostedGraph
from farspan.planner.forecast import Forecast, forecast
from farspan.planner.hinted import HintedProblem
from farspan.planner.pipeline import Pipeline, plan_pipeline
from farspan.planner.search.stages import Rules

__all__ = ["best_pipeline", "fitting", "rules_of"]

_MOST_SEARCHES = 4
"""With less memory each time."""
_MOST_CUTS = 4
"""Of each order of devices."""
_MOST_TASKS = 20_000
"""Of all steps that are played where the search finds nothing."""


def rules_of(problem: HintedProblem, num_micro_batches: int) -> Rules:
    """What the search is told of a step: one device for each stage, and what the hints ask for."""
    return Rules(micro_batches=num_micro_batches, max_replicas=1, num_stages=problem.hints.stages, least=problem.least)


def fitting(problem: HintedProblem, searched: Cluster, num_micro_batches: int) -> Forecast | None:
    """The best plan for the devices in `searched`, by the objective of the search; None where none fits.

    The search counts neither what a piece needs while it runs nor what is sent: where that is too much, it is told of
    so much less memory of such devices.
    """
    rules = rules_of(problem, num_micro_batches)
    less = dict.fromkeys((each.name for each in searched.classes), 0.0)
    for _ in range(_MOST_SEARCHES):
        classes = tuple(
            replace(each, memory_bytes=max(0.0, each.memory_bytes - less[each.name])) for each in searched.classes
        )
        pipeline = best_pipeline(problem.searched, Cluster(classes=classes), rules)
        if pipeline is None:
            break
        found = forecast(problem.graph, problem.cluster, pipeline, num_micro_batches)
        if found.fits:
            return found
        for name in less:
            own = (
                each for each, stage in zip(found.stages, pipeline.stages, strict=True) if stage.device_class == name
            )
            less[name] += max([0.0, *(stage.memory_bytes - stage.limit_bytes for stage in own)])
    return _first_that_fits(problem, searched, rules)


def _first_that_fits(problem: HintedProblem, searched: Cluster, rules: Rules) -> Forecast | None:
    """The first plan that fits as it is played."""
    orders, judge = Orders(problem.searched, searched, rules), Judge(problem, rules.micro_batches, _MOST_TASKS)
    for order in orders.plain():
        for pipeline in itertools.islice(orders.cuts(order), _MOST_CUTS):
            found = judge.better(pipeline, math.inf)
            if found is not None:
                return found
        if judge.is_done():
            break
    return None


def best_pipeline(graph: CostedGraph, cluster: Cluster, rules: Rules) -> Pipeline | None:
    """What is found; None where nothing fits."""
    try:
        return plan_pipeline(graph, cluster, rules=rules)
    except PlanError:
        return None
