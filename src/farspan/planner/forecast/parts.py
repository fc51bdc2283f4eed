"""The stages of a pipeline as they run, and the step they make: the tasks and orders that the runtime has, simulated.

A backward is split where the runtime splits it, by the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from farspan.cluster import Cluster, DeviceClass
from farspan.plan import Place, format_place
from farspan.planner.costed import CostedGraph, CostedNode
from farspan.planner.costed.problem import seconds_on
from farspan.planner.forecast.segments import make_segments
from farspan.planner.links import Link
from farspan.planner.pipeline import PipelineStage
from farspan.planner.simulate import simulate
from farspan.planner.simulation import Simulation
from farspan.schedule import (
    LEAST_WEIGHT_WORK_S,
    LOOKAHEAD,
    NOMINAL_S,
    Kind,
    Schedule,
    Task,
    is_worth_splitting,
    orders_by_name,
    run_ahead_of,
    split_from,
    whole_until,
)

__all__ = ["Part", "Stages"]


class Part:
    """A stage on its device.

    Attributes:
        nodes: Names of what runs there.
        kind: Its device's class.
        rank: Its number, as ranks count.
        host: Class and number of its host.
        remat: Names of the nodes that are run in another way than they are given.
        chosen: The nodes as they run there.
        costs_of: By name of a node, what it takes there of a micro-batch.
        forward_s: Seconds of a micro-batch's forward.
        backward_s: The same of its backward.
        parameter_bytes: What is trained there.
        memory_bytes: What lies there all the time.
    """

    def __init__(self, graph: CostedGraph, stage: PipelineStage, kind: DeviceClass) -> None:
        inside = set(stage.nodes)
        self.nodes = tuple(node.name for node in graph.nodes if node.name in inside)
        self.kind = kind
        self.rank = 0
        self.host: tuple[str, int] = ("", 0)
        self.remat = tuple(name for name in self.nodes if stage.options.get(name))
        self.chosen = [node.as_run(stage.options.get(node.name, "")) for node in graph.nodes if node.name in inside]
        self.costs_of = {node.name: _costs(node, kind) for node in self.chosen}
        self.forward_s = sum(each.forward_s for each in self.costs_of.values())
        self.backward_s = sum(each.backward_s for each in self.costs_of.values())
        self.parameter_bytes = sum(node.parameter_bytes for node in self.chosen)
        self.memory_bytes = sum(node.memory_bytes for node in self.chosen)

    @property
    def where(self) -> str:
        return format_place(Place(rank=self.rank, device=self.kind.device or None))

    @property
    def device(self) -> str:
        """The kind that the rule on splitting knows."""
        return self.kind.kind.lower()


class Stages:
    """The stages of a pipeline on their devices, cut into segments.

    Attributes:
        cluster: Where they run.
        parts: The stages, in order.
        segments: In an order in which each comes after all that it uses.
        ranks: The rank of each segment.
    """

    def __init__(self, graph: CostedGraph, cluster: Cluster, stages: Sequence[PipelineStage]) -> None:
        kinds = {each.name: each for each in cluster.classes}
        self.cluster = cluster
        self.parts = [Part(graph, stage, kinds[stage.device_class]) for stage in stages]
        self._give_ranks()
        self.segments = make_segments(graph, [part.chosen for part in self.parts])
        self.ranks = [self.parts[segment.stage].rank for segment in self.segments]
        self._costs = [_costs_of(segment.nodes, self.parts[segment.stage]) for segment in self.segments]
        self._part_of = {part.rank: part for part in self.parts}
        self._sent = self._bytes_by_rank(is_gradient=False)
        self._returned = self._bytes_by_rank(is_gradient=True)

    def _give_ranks(self) -> None:
        """Give each stage a device of its class; ranks count host by host, as the cluster names them."""
        for kind in self.cluster.classes:
            own = (part for part in self.parts if part.kind.name == kind.name)
            for part, (number, host) in zip(own, self.cluster.devices(kind), strict=False):
                part.rank, part.host = number, (kind.whole, host)
        for rank, part in enumerate(sorted(self.parts, key=lambda part: part.rank)):
            part.rank = rank

    def _bytes_by_rank(self, *, is_gradient: bool) -> list[tuple[tuple[int, float], ...]]:
        """By segment, what each of its tasks sends to which ranks."""
        sizes: list[dict[int, float]] = [{} for _ in self.segments]
        for segment, rank in zip(self.segments, self.ranks, strict=True):
            for hop in segment.returned if is_gradient else segment.received:
                if not hop.is_once and self.ranks[hop.source] != rank:
                    sizes[hop.source][rank] = sizes[hop.source].get(rank, 0.0) + hop.sent_bytes
        return [tuple(sorted(each.items())) for each in sizes]

    def simulate(self, num_micro_batches: int, schedule: str, lookahead: int = LOOKAHEAD) -> Simulation:
        """Simulate a step by the schedule of that name, with what `lookahead` lets it have in flight."""
        tasks = self._tasks(num_micro_batches, LEAST_WEIGHT_WORK_S[schedule])
        split = {task.needs[0] for task in tasks if task.kind is Kind.WEIGHT}
        nominal = tuple(
            replace(
                task,
                duration=NOMINAL_S * (2 if task.kind is Kind.BACKWARD and index not in split else 1),
                output_bytes=(),
            )
            for index, task in enumerate(tasks)
        )
        first, orders = _orders(schedule, nominal, len(self.parts), run_ahead_of(schedule, lookahead))
        tasks = whole_until(tasks, first)
        return simulate(Schedule(tasks=tasks, orders=orders), link_of=self._link)

    def _link(self, source: int, destination: int) -> Link:
        one, other = self._part_of[source], self._part_of[destination]
        ends = [one.kind, other.kind]
        if one.host == other.host:
            bandwidth = min(each.within_bytes_per_s for each in ends)
        else:
            bandwidth = min(map(self.cluster.link, ends))
        latency = max(each.latency_s for each in ends)
        return Link(name=f"{source}>{destination}", latency=latency, bandwidth=bandwidth)

    def _tasks(self, num_micro_batches: int, least_s: float) -> tuple[Task, ...]:
        """Per micro-batch the forwards of all segments, then their backwards, the last segment first."""
        splits = self._splits(least_s)
        sources = [sorted(segment.uses) for segment in self.segments]
        tasks: list[Task] = []
        for micro_batch in range(num_micro_batches):
            first = len(tasks)
            for number, segment in enumerate(self.segments):
                tasks.append(
                    Task(
                        kind=Kind.FORWARD,
                        rank=self.ranks[number],
                        micro_batch=micro_batch,
                        level=segment.level,
                        duration=self._costs[number].forward_s,
                        needs=tuple(first + source for source in sources[number]),
                        holds=segment.has_backward,
                        memory=float(segment.has_backward),
                        output_bytes=self._sent[number],
                    )
                )
            backwards: dict[int, int] = {}
            for number in reversed(range(len(self.segments))):
                segment, costs, is_split = self.segments[number], self._costs[number], splits[number]
                if not segment.has_backward:
                    continue
                backwards[number] = len(tasks)
                users = {backwards[hop.source] for hop in segment.returned}
                tasks.append(
                    Task(
                        kind=Kind.BACKWARD,
                        rank=self.ranks[number],
                        micro_batch=micro_batch,
                        level=segment.level,
                        duration=costs.backward_s - (costs.weight_s if is_split else 0.0),
                        needs=tuple(sorted({first + number, *users})),
                        holds=False,
                        memory=0.0 if is_split else -1.0,
                        output_bytes=self._returned[number],
                    )
                )
                if is_split:
                    weights = replace(
                        tasks[-1],
                        kind=Kind.WEIGHT,
                        duration=costs.weight_s,
                        needs=(backwards[number],),
                        memory=-1.0,
                        output_bytes=(),
                    )
                    tasks.append(weights)
        return tuple(tasks)

    def _splits(self, least_s: float) -> list[bool]:
        """Decide of each segment, as `runtime.program` does, whether its backward is done in two halves."""
        passes_on: list[set[int]] = [set() for _ in self.segments]
        for number, segment in enumerate(self.segments):
            for hop in segment.returned:
                passes_on[hop.source].add(number)
        found: list[bool] = []
        feeds_another_rank: list[bool] = []
        for number, segment in enumerate(self.segments):
            costs, part = self._costs[number], self.parts[segment.stage]
            feeds_another_rank.append(
                any(self.ranks[each] != self.ranks[number] or feeds_another_rank[each] for each in passes_on[number])
            )
            is_worth_it = segment.has_weights and is_worth_splitting(costs.weight_flops, part.device, least_s)
            found.append(feeds_another_rank[number] and is_worth_it)
        return found


class _Costs(NamedTuple):
    """What nodes take of a micro-batch on a device; `weight_s` is how much of the backward can be deferred."""

    forward_s: float
    backward_s: float
    weight_s: float
    weight_flops: float


def _costs(node: CostedNode, kind: DeviceClass) -> _Costs:
    backward_s = seconds_on(replace(node, forward_s=0.0), kind)
    return _Costs(
        forward_s=seconds_on(replace(node, backward_s=0.0), kind),
        backward_s=backward_s,
        weight_s=min(backward_s, seconds_on(replace(node, forward_s=0.0, backward_s=node.weight_s), kind)),
        weight_flops=node.weight_flops,
    )


def _costs_of(nodes: Sequence[CostedNode], part: Part) -> _Costs:
    return _Costs(*map(sum, zip(*(part.costs_of[node.name] for node in nodes), strict=True)))


@lru_cache(maxsize=64)
def _orders(
    schedule: str, nominal: tuple[Task, ...], num_ranks: int, run_ahead: int
) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """The first micro-batch whose backwards are split, and the orders that the runtime makes then: the same for all
    cuts of a row with the same backwards worth it.
    """
    first = split_from(schedule, nominal, num_ranks, run_ahead=run_ahead)
    orders = orders_by_name(schedule, whole_until(nominal, first), num_ranks, run_ahead=run_ahead)
    return first, tuple(map(tuple, orders))
