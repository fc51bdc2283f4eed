"""Other plans next to one: its devices in another order, what lies beside a border on its other side.

    order      a b b     ->   b a b,  b b,  a a b, ..      and the best cuts for that order of devices
    border     ..x | y   ->   .. | xy,  ..xy | ..

What is played decides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from farspan.cluster import Cluster
from farspan.planner.answer.orders import Orders
from farspan.planner.costed import CostedGraph
from farspan.planner.costed.problem import seconds_on
from farspan.planner.forecast import Forecast, forecast, shortest_step
from farspan.planner.hinted import HintedProblem
from farspan.planner.pipeline import Pipeline

__all__ = ["Judge", "improved", "moved"]

_MOST_AT_ONCE = 2
"""Pieces that change sides together."""
_NUM_KEPT = 3
"""Orders of devices whose neighbours are looked at."""
_CLOSE = 1.15
"""Borders are moved where the step is at most so many times the shortest."""
_MOST_TASKS = 300_000
"""Of all steps that are played; some 4 s."""
_MOST_S = 10.0
_SAME = 1 - 1e-6


class Judge:
    """Plays steps, until there were enough."""

    def __init__(self, problem: HintedProblem, num_micro_batches: int) -> None:
        self.problem, self.num_micro_batches = problem, num_micro_batches
        self.num_tasks_left = float(_MOST_TASKS)
        self._deadline = time.monotonic() + _MOST_S
        self._seen: set[tuple[tuple[str, tuple[str, ...]], ...]] = set()

    def is_done(self, kept: float = 0.0) -> bool:
        """Whether only that share of all tasks is left, or no time."""
        return self.num_tasks_left <= kept * _MOST_TASKS or time.monotonic() > self._deadline

    def better(self, pipeline: Pipeline, than_s: float) -> Forecast | None:
        """What its step will be like, if it fits and is shorter than that; None too if asked again."""
        key = tuple((stage.device_class, stage.nodes) for stage in pipeline.stages)
        if key in self._seen or self.is_done():
            return None
        self._seen.add(key)
        graph, cluster = self.problem.graph, self.problem.cluster
        self.num_tasks_left -= 5 * len(pipeline.stages) * self.num_micro_batches + len(graph.nodes)
        if shortest_step(graph, cluster, pipeline, self.num_micro_batches) >= than_s * _SAME:
            return None
        found = forecast(graph, cluster, pipeline, self.num_micro_batches)
        return found if found.fits and found.step_s < than_s * _SAME else None


def improved(starts: Sequence[Forecast], orders: Orders, judge: Judge) -> Forecast:
    """The best plan that is found from those, with devices in other orders and other borders.

    Args:
        starts: Where to begin.
        orders: Cuts for devices in any order.
        judge: Whose word counts.
    """
    known: dict[tuple[str, ...], Forecast | None] = {}
    for each in starts:
        order = _order_of(each)
        before = known.get(order)
        known[order] = each if before is None or each.step_s < before.step_s else before
    for order in list(known):
        for other in (order, *_sorted(order, judge.problem.cluster)):
            _look_at(other, known, orders, judge)
    expanded: set[tuple[str, ...]] = set()
    while not judge.is_done(0.5):
        kept = [_order_of(each) for each in _by_step(known)[:_NUM_KEPT]]
        order = next((each for each in kept if each not in expanded), None)
        if order is None:
            break
        expanded.add(order)
        for other in orders.beside(order):
            if other not in known and not judge.is_done(0.5):
                _look_at(other, known, orders, judge)
    best = _by_step(known)[0]
    for each in _by_step(known):
        if each.step_s > best.step_s * _CLOSE:
            break
        found = _with_borders_moved(each, judge)
        best = found if found.step_s < best.step_s * _SAME else best
    return best


_Known = dict[tuple[str, ...], Forecast | None]


def _look_at(order: tuple[str, ...], known: _Known, orders: Orders, judge: Judge) -> None:
    """Note the best cut for that order."""
    best = known.get(order)
    judge.num_tasks_left -= orders.work(order)
    for pipeline in orders.cuts(order):
        best = judge.better(pipeline, math.inf if best is None else best.step_s) or best
    known[order] = best


def _by_step(known: _Known) -> list[Forecast]:
    return sorted((each for each in known.values() if each is not None), key=lambda each: each.step_s)


def _order_of(each: Forecast) -> tuple[str, ...]:
    return tuple(stage.device_class for stage in each.pipeline.stages)


def _sorted(order: tuple[str, ...], cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """The fast devices first, or last, or those of little memory."""
    kinds = {each.name: each for each in cluster.classes}
    for what in ("speed", "memory_bytes"):
        for sign in (1, -1):
            yield tuple(sorted(order, key=lambda name, what=what, sign=sign: sign * getattr(kinds[name], what)))


def _with_borders_moved(best: Forecast, judge: Judge) -> Forecast:
    gains = True
    while gains:
        gains = False
        for pipeline in _beside(best, judge.problem.graph, judge.problem.cluster):
            found = judge.better(pipeline, best.step_s)
            if found is not None:
                best, gains = found, True
                break
            if judge.is_done():
                return best
    return best


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
