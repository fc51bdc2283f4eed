"""Other plans next to one: its devices in another order, what lies beside a border on its other side.

    order      a b b     ->   b a b,  b b,  a a b, ..      and the best cuts for that order of devices
    border     ..x | y   ->   .. | xy,  ..xy | ..

What is simulated decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from farspan.cluster import Cluster, DeviceClass
from farspan.planner.constraints import HintedProblem
from farspan.planner.cost_model import CostedGraph, CostedNode
from farspan.planner.cost_model.colocation import seconds_on
from farspan.planner.optimize.orders import Orders
from farspan.planner.pipeline import Pipeline, PipelineStage
from farspan.planner.prediction import Prediction, predict_step, shortest_step

__all__ = ["Borders", "Judge", "improved"]

_MOST_AT_ONCE = 2
"""Units that change sides together."""
_NUM_KEPT = 3
"""Limit on the orders of devices whose neighbours are tried."""
_CLOSE = 1.15
"""Borders are moved where the step is at most so many times the shortest."""
_MOST_TASKS = 200_000
"""Limit on the tasks of all steps that are simulated; some 3 s."""
_SAME = 1 - 1e-6


class Judge:
    """Simulates steps, until there were enough."""

    def __init__(self, problem: HintedProblem, num_micro_batches: int, num_tasks: int = _MOST_TASKS) -> None:
        self.problem, self.num_micro_batches = problem, num_micro_batches
        self.num_tasks, self.num_tasks_left = num_tasks, float(num_tasks)
        self._seen: set[object] = set()
        self._nodes = {node.name: node for node in problem.graph.nodes}
        self._kinds = {each.name: each for each in problem.cluster.classes}

    def is_done(self, kept: float = 0.0) -> bool:
        """Returns whether no more than a share `kept` of the tasks that it may simulate is left."""
        return self.num_tasks_left <= kept * self.num_tasks

    @property
    def num_tasks_used(self) -> float:
        """The tasks that it has simulated, and other work that was charged."""
        return self.num_tasks - self.num_tasks_left

    def charge(self, num_tasks: float) -> bool:
        """Counts other work that takes as long as so many tasks; returns whether any is left."""
        self.num_tasks_left -= num_tasks
        return not self.is_done()

    def better(self, pipeline: Pipeline, than_s: float) -> Prediction | None:
        """Predicts its step, if it fits and is shorter than that; returns None too if asked again."""
        key = tuple((stage.device_class, stage.nodes, tuple(stage.options.items())) for stage in pipeline.stages)
        if key in self._seen or self.is_done():
            return None
        self._seen.add(key)
        if self.num_micro_batches * max(map(self._seconds, pipeline.stages)) >= than_s * _SAME:
            return None
        graph, cluster = self.problem.graph, self.problem.cluster
        # Of each micro-batch and stage: five tasks under two schedules, and three more with more in flight.
        self.num_tasks_left -= 8 * len(pipeline.stages) * self.num_micro_batches + len(graph.nodes)
        if than_s < math.inf and shortest_step(graph, cluster, pipeline, self.num_micro_batches) >= than_s * _SAME:
            return None
        found = predict_step(graph, cluster, pipeline, self.num_micro_batches)
        return found if found.fits and found.step_s < than_s * _SAME else None

    def _seconds(self, stage: PipelineStage) -> float:
        """Returns how long its nodes compute for a micro-batch, forward and backward."""
        kind = self._kinds[stage.device_class]
        return sum(seconds_on(self._nodes[name].as_run(stage.options.get(name, "")), kind) for name in stage.nodes)


def improved(
    starts: Sequence[Prediction], orders: Orders, judge: Judge, allowed: Sequence[tuple[str, ...]] = ()
) -> Prediction:
    """Returns the best plan that is found from those, with devices in other orders and other borders.

    Args:
        starts: Where to begin.
        orders: Cuts for devices in any order.
        judge: Whose word counts.
        allowed: Orders of devices that the bound allows a short step.
    """
    known: dict[tuple[str, ...], Prediction | None] = {}
    for each in starts:
        order = _order_of(each)
        before = known.get(order)
        known[order] = each if before is None or each.step_s < before.step_s else before
    firsts = [order for order in allowed if orders.may_be(order)]
    firsts += [other for order in known for other in (order, *orders.sorted(order))]
    for order in dict.fromkeys(firsts):
        _try_order(order, known, orders, judge)
    expanded: set[tuple[str, ...]] = set()
    while not judge.is_done(0.5):
        kept = [_order_of(each) for each in _by_step(known)[:_NUM_KEPT]]
        order = next((each for each in kept if each not in expanded), None)
        if order is None:
            break
        expanded.add(order)
        for other in orders.beside(order):
            if other not in known and not judge.is_done(0.5):
                _try_order(other, known, orders, judge)
    best = _by_step(known)[0]
    borders = Borders(judge.problem.graph, judge.problem.cluster)
    for each in _by_step(known):
        if each.step_s > best.step_s * _CLOSE:
            break
        found = _with_borders_moved(each, borders, judge)
        best = found if found.step_s < best.step_s * _SAME else best
    return best


_Known = dict[tuple[str, ...], Prediction | None]


def _try_order(order: tuple[str, ...], known: _Known, orders: Orders, judge: Judge) -> None:
    """Adds to `known` the best of the plans with that order of devices."""
    best = known.get(order)
    judge.charge(orders.work(order))
    for pipeline in orders.cuts(order):
        best = judge.better(pipeline, math.inf if best is None else best.step_s) or best
    known[order] = best


def _by_step(known: _Known) -> list[Prediction]:
    return sorted((each for each in known.values() if each is not None), key=lambda each: each.step_s)


def _order_of(each: Prediction) -> tuple[str, ...]:
    return tuple(stage.device_class for stage in each.pipeline.stages)


def _with_borders_moved(best: Prediction, borders: Borders, judge: Judge) -> Prediction:
    """Moves units over borders one by one for as long as that gains; then at two borders at once."""
    gains = True
    while gains:
        gains = False
        for pipeline in itertools.chain(borders.beside(best.pipeline), borders.twice_beside(best.pipeline)):
            found = judge.better(pipeline, best.step_s)
            if found is not None:
                best, gains = found, True
                break
            if judge.is_done():
                return best
    return best


class Borders:
    """The nodes at the borders between stages that may go to the other side."""

    def __init__(self, graph: CostedGraph, cluster: Cluster) -> None:
        self._nodes = {node.name: node for node in graph.nodes}
        self._kinds = {each.name: each for each in cluster.classes}
        self._place = {node.name: place for place, node in enumerate(graph.nodes)}
        self._with: dict[str, set[str]] = {}
        """For each node, by name, those that go along wherever it goes."""
        words: dict[str, set[str]] = {}
        for node in graph.nodes:
            word = {node.name} if node.together is None else words.setdefault(node.together, set())
            word.add(node.name)
            self._with[node.name] = word
        self._sources: dict[str, set[str]] = {name: set() for name in self._nodes}
        self._targets: dict[str, set[str]] = {name: set() for name in self._nodes}
        for edge in graph.edges:
            self._sources[edge.target].add(edge.source)
            self._targets[edge.source].add(edge.target)

    def moved(self, pipeline: Pipeline, name: str, stage: int, other: int, most: float = math.inf) -> Pipeline | None:
        """Returns the pipeline with `name`, and what lies between it and the stage beside, in that stage.

        None if that leaves nothing where it was, may not run there, or is more than so many units.
        """
        stages = list(pipeline.stages)
        going = self._going(pipeline, name, stage, other, most)
        if not going or len(going) == len(stages[stage].nodes):
            return None
        ways = self._ways(pipeline, going, stage, other)
        if None in ways.values():
            return None
        options = {each: way for each, way in ways.items() if way}
        staying = tuple(each for each in stages[stage].nodes if each not in going)
        nodes = tuple(sorted((*stages[other].nodes, *going), key=lambda each: self._place[each]))
        left = {each: option for each, option in stages[stage].options.items() if each not in going}
        stages[stage] = replace(stages[stage], nodes=staying, options=left)
        stages[other] = replace(stages[other], nodes=nodes, options={**stages[other].options, **options})
        return replace(pipeline, stages=tuple(stages))

    def obstacle(self, pipeline: Pipeline, name: str, stage: int, other: int) -> str:
        """Returns why `name` cannot go to the stage beside, as the end of a sentence; empty if it can."""
        going = self._going(pipeline, name, stage, other)
        stuck = [each for each, way in self._ways(pipeline, going, stage, other).items() if way is None]
        if stuck:
            return "it may not run there" if name in stuck else f"{stuck[0]} must go along, and may not run there"
        if len(going) < len(pipeline.stages[stage].nodes):
            return ""
        with_it = f"the {len(going) - 1} more that must go along" if len(going) > 1 else "it"
        return f"with {with_it} nothing would be left"

    def _going(self, pipeline: Pipeline, name: str, stage: int, other: int, most: float = math.inf) -> set[str]:
        before = self._sources if other < stage else self._targets
        return self._between(set(pipeline.stages[stage].nodes), name, before, most)

    def _ways(self, pipeline: Pipeline, going: set[str], stage: int, other: int) -> dict[str, str | None]:
        """Returns for each node the option with which it runs in the other stage; None where it may not."""
        kind, before = self._kinds[pipeline.stages[other].device_class], pipeline.stages[stage].options
        return {each: _way_on(self._nodes[each], kind, before.get(each, "")) for each in sorted(going)}

    def _between(self, inside: set[str], name: str, before: Mapping[str, set[str]], most: float) -> set[str]:
        """Returns what goes along if `name` leaves the nodes `inside`: what is before it there, and what it must be
        with.

        Empty if these are too many.
        """
        going, waiting = {name}, [name]
        while waiting:
            each = waiting.pop()
            joining = ((before[each] | self._with[each]) & inside) - going
            going |= joining
            waiting += joining
            if len(going) > most:
                return set()
        return going

    def beside(self, pipeline: Pipeline, near: Sequence[int] | None = None) -> Iterator[Pipeline]:
        """Yields pipelines with few units on the other side of a border; of one of the stages `near` only."""
        for stage in range(len(pipeline.stages)):
            for other in (stage - 1, stage + 1):
                is_near = near is None or stage in near or other in near
                if not (0 <= other < len(pipeline.stages) and is_near):
                    continue
                for name in pipeline.stages[stage].nodes:
                    found = self.moved(pipeline, name, stage, other, _MOST_AT_ONCE)
                    if found is not None:
                        yield found

    def twice_beside(self, pipeline: Pipeline) -> Iterator[Pipeline]:
        """Yields the same with units on the other side of one border more, of the same stages."""
        for once in self.beside(pipeline):
            pairs = zip(pipeline.stages, once.stages, strict=True)
            near = [stage for stage, (old, new) in enumerate(pairs) if old.nodes != new.nodes]
            yield from self.beside(once, near)


def _way_on(node: CostedNode, kind: DeviceClass, before: str) -> str | None:
    """Returns the option with which a node runs on a device of that class: as before, or the first that may; None if
    none."""
    ways = (before, *node.names_of_ways)
    return next((way for way in ways if math.isfinite(seconds_on(node.as_run(way), kind))), None)
