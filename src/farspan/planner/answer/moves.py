"""Other cuts: what lies beside a border goes to its other side."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

from farspan.cluster import Cluster
from farspan.planner.costed import CostedGraph
from farspan.planner.costed.problem import seconds_on
from farspan.planner.forecast import Forecast, forecast
from farspan.planner.pipeline import Pipeline

__all__ = ["improved", "moved"]

_MOST_AT_ONCE = 2
"""Pieces that change sides together."""


def moved(best: Forecast, graph: CostedGraph, cluster: Cluster, name: str, stage: int, other: int) -> Pipeline | None:
    """The pipeline with `name`, and what lies between it and the stage beside, in that stage.

    None if that leaves nothing where it was, or may not run there.
    """
    going = _between(best, graph, name, stage, other)
    kind = next(each for each in cluster.classes if each.name == best.pipeline.stages[other].device_class)
    may_run = all(math.isfinite(seconds_on(node, kind)) for node in graph.nodes if node.name in going)
    if len(going) == len(best.stages[stage].nodes) or not may_run:
        return None
    stages = list(best.pipeline.stages)
    options = {each: option for each, option in stages[stage].options.items() if each in going}
    stages[stage] = replace(stages[stage], nodes=tuple(each for each in stages[stage].nodes if each not in going))
    stages[other] = replace(
        stages[other],
        nodes=(*stages[other].nodes, *sorted(going)),
        options={**stages[other].options, **options},
    )
    return replace(best.pipeline, stages=tuple(stages))


def improved(best: Forecast, graph: CostedGraph, cluster: Cluster, *, seconds: float) -> Forecast:
    """Move what lies at borders for as long as the step that is played gets shorter.

    Args:
        best: Where to begin.
        graph: What is placed.
        cluster: Where.
        seconds: About how long to try.
    """
    deadline = time.monotonic() + seconds
    gains = True
    while gains and time.monotonic() < deadline:
        gains = False
        for pipeline in _beside(best, graph, cluster):
            found = forecast(graph, cluster, pipeline, best.num_micro_batches)
            if found.fits and found.step_s < best.step_s * (1 - 1e-6):
                best, gains = found, True
                break
            if time.monotonic() > deadline:
                break
    return best


def _beside(best: Forecast, graph: CostedGraph, cluster: Cluster) -> Iterator[Pipeline]:
    slowest_first = sorted(
        range(len(best.stages)), key=lambda stage: -best.stages[stage].forward_s - best.stages[stage].backward_s
    )
    for stage in slowest_first:
        for other in (stage - 1, stage + 1):
            if not 0 <= other < len(best.stages):
                continue
            for name in best.stages[stage].nodes:
                if len(_between(best, graph, name, stage, other)) <= _MOST_AT_ONCE:
                    pipeline = moved(best, graph, cluster, name, stage, other)
                    if pipeline is not None:
                        yield pipeline


def _between(best: Forecast, graph: CostedGraph, name: str, stage: int, other: int) -> set[str]:
    """What goes along if `name` leaves its stage: what is before it there, or after it; and what it must be with."""
    inside = {node.name: node.together for node in graph.nodes if node.name in best.stages[stage].nodes}
    going, grows = {name}, True
    while grows:
        grows = False
        words = {inside[each] for each in going} - {None}
        joining = {each for each, word in inside.items() if word in words}
        for edge in graph.edges:
            near, far = (edge.source, edge.target) if other < stage else (edge.target, edge.source)
            if far in going and near in inside:
                joining.add(near)
        grows = not joining <= going
        going |= joining
    return going
