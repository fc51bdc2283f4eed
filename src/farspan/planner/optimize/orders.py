"""Cuts for devices in a given order: which of their stages come first changes a step that is simulated.

A step is about the sum of what each stage adds once (its fill) and what the slowest takes for each micro-batch (its
rate). For a chain of k devices and a cap on the rate,

    best(s, i) = min over ends j of i, rate(i, j) <= cap, of    fill(i, j) + best(s + 1, j)

with the fill of a whole forward and backward, or without the gradients of weights, for these fill what would be gaps.
Caps from the smallest that there can be upwards give one cut after the other; what is simulated decides between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from farspan.cluster import Cluster
from farspan.planner.cost_model import CostedGraph
from farspan.planner.cost_model.colocation import FloatArray, group_nodes, seconds_on
from farspan.planner.partition_dp.chain import Step
from farspan.planner.partition_dp.cuts import good_prefixes
from farspan.planner.partition_dp.lattice import make_lattice
from farspan.planner.partition_dp.stages import Rules, StageLoads
from farspan.planner.pipeline import Pipeline, PipelineStage, stage_of

__all__ = ["Orders"]

_CAPS = (1.0, 1.03, 1.1, 1.25, 1.6, 4.0)
"""Times the smallest rate."""
_PAIRS_PER_TASK = 2_500
"""Stages that are tried in the time in which one task is simulated."""


class Orders:
    """Cuts of `graph` for any order of the devices of `cluster`, each with one stage."""

    def __init__(self, graph: CostedGraph, cluster: Cluster, rules: Rules) -> None:
        self.graph, self.cluster, self.rules = graph, cluster, rules
        group_of, before = group_nodes(graph)
        prefixes, is_complete = good_prefixes(graph, group_of, before)
        lattice = make_lattice(max(group_of) + 1, prefixes, is_complete=is_complete)
        one_each = replace(rules, max_replicas=1)
        without_transfers = replace(one_each, passes=0.0)
        self.loads = StageLoads(graph, cluster, group_of, lattice, one_each).of_one_device()
        self.computing = StageLoads(graph, cluster, group_of, lattice, without_transfers).of_one_device()
        self.num_units = max(group_of) + 1
        self.number_of = {each.name: number for number, each in enumerate(cluster.classes)}
        weights = np.zeros((max(group_of) + 1, len(cluster.classes)))
        for node, group in zip(graph.nodes, group_of, strict=True):
            only = replace(node, forward_s=0.0, backward_s=node.weight_s)
            weights[group] += [seconds_on(only, each) for each in cluster.classes]
        self.weights = lattice.members() @ np.where(np.isfinite(weights), weights, 0.0)  # [prefix, class]
        self._known: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}

    def cuts(self, order: Sequence[str]) -> Iterator[Pipeline]:
        """Yields pipelines of a stage on a device of each of those classes, in that order, the most even first."""
        seen: set[tuple[int, ...]] = set()
        depths = range(len(order), 0, -1)
        both = [self._seconds(self.number_of[name], depth) for name, depth in zip(order, depths, strict=True)]
        weights = [self._weight(self.number_of[name]) for name in order]
        onces = [once for _, once in both]
        for rates in ([rate for rate, _ in both], onces):
            smallest = _smallest_cap(rates)
            if not np.isfinite(smallest):
                return
            for times, off in itertools.product(_CAPS, (0.0, 1.0)):
                fills = [
                    np.where(rate <= smallest * times * (1 + 1e-9), once - off * weight, np.inf)
                    for rate, once, weight in zip(rates, onces, weights, strict=True)
                ]
                ends = _chain(fills)
                if ends not in seen:
                    seen.add(ends)
                    yield self._pipeline(order, ends)

    def work(self, order: Sequence[str]) -> float:
        """About as many tasks are simulated in the time that `cuts` takes."""
        return 4 * len(_CAPS) * len(order) * self.loads.num_prefixes**2 / _PAIRS_PER_TASK

    def sorted(self, order: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Yields the same devices, those of much memory first, or last, or the fast ones."""
        kinds = {each.name: each for each in self.cluster.classes}
        for what in ("memory_bytes", "speed"):
            for sign in (-1, 1):
                yield tuple(sorted(order, key=lambda name, what=what, sign=sign: sign * getattr(kinds[name], what)))

    def plain(self) -> Iterator[tuple[str, ...]]:
        """Yields some orders for each number of devices, the most devices first."""
        every = [each.name for each in self.cluster.classes for _ in range(each.num_devices)]
        for count in range(min(len(every), self.num_units), 0, -1):
            found = (each[:count] for each in self.sorted(every))
            yield from (order for order in dict.fromkeys(found) if self.may_be(order))

    def beside(self, order: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """Orders that differ in one exchange of two devices, or in one device."""
        for first, second in itertools.combinations(range(len(order)), 2):
            if order[first] != order[second]:
                other = list(order)
                other[first], other[second] = order[second], order[first]
                yield tuple(other)
        left = {each.name: each.num_devices - order.count(each.name) for each in self.cluster.classes}
        spare = [name for name, count in left.items() if count > 0]
        others = [
            (*order[:place], *new, *order[place + 1 :]) for place in range(len(order)) for new in [(), *zip(spare)]
        ]
        others += [(*order[:place], name, *order[place:]) for place in range(len(order) + 1) for name in spare]
        yield from (other for other in dict.fromkeys(others) if self.may_be(other))

    def may_be(self, order: Sequence[str]) -> bool:
        """Returns whether the rules allow a plan on those devices."""
        rules = self.rules
        is_enough = all(order.count(name) >= count for name, count in rules.least.items())
        return is_enough and len(order) in (
            range(1, self.num_units + 1) if rules.num_stages is None else (rules.num_stages,)
        )

    def _seconds(self, device_class: int, depth: int) -> tuple[FloatArray, FloatArray]:
        """[start, end] of a micro-batch in that stage, without transfers and with them; infinite where it cannot be."""
        depth = min(depth, self.loads.num_depths - 1)
        if (device_class, depth) not in self._known:
            count, number = self.loads.num_prefixes, self._option(device_class)
            found = (np.full((count, count), np.inf), np.full((count, count), np.inf))
            for loads, seconds in zip((self.computing, self.loads), found, strict=True):
                fills = loads.of("fill")
                for start in range(count - 1):
                    ends = fills.ends(start)
                    seconds[start, ends] = fills.loads(start, ends)[number][:, depth]
            self._known[device_class, depth] = found
        return self._known[device_class, depth]

    def _weight(self, device_class: int) -> FloatArray:
        """[start, end] seconds of gradients of weights."""
        until = self.weights[:, device_class]
        return until[None, :] - until[:, None]

    def _option(self, device_class: int) -> int:
        return next(number for number, each in enumerate(self.loads.options) if each.device_class == device_class)

    def _pipeline(self, order: Sequence[str], ends: Sequence[int]) -> Pipeline:
        stages: list[PipelineStage] = []
        for place, (name, start, end) in enumerate(zip(order, [0, *ends], ends, strict=False)):
            device_class = self.number_of[name]
            depth = min(len(order) - place, self.loads.num_depths - 1)
            step = Step(start=start, end=end, phase=0, option=self._option(device_class), depth=depth, load=0.0)
            stages.append(stage_of(self.graph, self.loads, step))
        return Pipeline(stages=tuple(stages))


def _smallest_cap(rates: Sequence[FloatArray]) -> float:
    best = np.full(len(rates[0]), np.inf)
    best[-1] = 0.0
    for rate in reversed(rates):
        best = np.maximum(rate, best[None, :]).min(axis=1)
    return float(best[0])


def _chain(fills: Sequence[FloatArray]) -> tuple[int, ...]:
    """Returns where each stage ends, with the smallest sum."""
    best = np.full(len(fills[0]), np.inf)
    best[-1] = 0.0
    choices: list[np.ndarray] = []
    for fill in reversed(fills):
        sums = fill + best[None, :]
        choices.append(sums.argmin(axis=1))
        best = sums.min(axis=1)
    ends = [0]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return tuple(ends[1:])
