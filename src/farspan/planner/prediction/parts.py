"""The stages of a pipeline as they run, and the step they make: the tasks and orders of the runtime, simulated.

Both are made by `program.tasks`, of the same numbers: what is predicted is what runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from farspan.cluster import Cluster, DeviceClass
from farspan.plan import Place, format_place
from farspan.planner.cost_model import CostedGraph, CostedNode
from farspan.planner.cost_model.colocation import seconds_on
from farspan.planner.links import Link
from farspan.planner.pipeline import PipelineStage
from farspan.planner.prediction.segments import make_segments
from farspan.planner.simulate import simulate
from farspan.planner.simulation import Simulation
from farspan.program.tasks import BackwardWork, ForwardWork, StepTasks, StepWork, scheduled
from farspan.schedule import LEAST_WEIGHT_WORK_S, LOOKAHEAD, Kind, Schedule, Task, is_worth_splitting, run_ahead_of

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
        self._backwards = [
            number for number in reversed(range(len(self.segments))) if self.segments[number].has_backward
        ]
        """Segments in the order of their backwards."""
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
        """Returns for each segment what each of its tasks sends to which ranks."""
        sizes: list[dict[int, float]] = [{} for _ in self.segments]
        for segment, rank in zip(self.segments, self.ranks, strict=True):
            for hop in segment.returned if is_gradient else segment.received:
                if not hop.is_once and self.ranks[hop.source] != rank:
                    sizes[hop.source][rank] = sizes[hop.source].get(rank, 0.0) + hop.sent_bytes
        return [tuple(sorted(each.items())) for each in sizes]

    def simulate(self, num_micro_batches: int, schedule: str, lookahead: int = LOOKAHEAD) -> Simulation:
        """Simulate a step by the schedule of that name, with what `lookahead` lets it have in flight."""
        run_ahead = run_ahead_of(schedule, lookahead)
        work = self._work(LEAST_WEIGHT_WORK_S[schedule])
        found = _scheduled(work, num_micro_batches, schedule, len(self.parts), run_ahead)
        tasks = self._timed(found, len(work.backwards))
        return simulate(Schedule(tasks=tasks, orders=found.schedule.orders), link_of=self._link)

    def _link(self, source: int, destination: int) -> Link:
        one, other = self._part_of[source], self._part_of[destination]
        ends = [one.kind, other.kind]
        if one.host == other.host:
            bandwidth = min(each.within_bytes_per_s for each in ends)
        else:
            bandwidth = min(map(self.cluster.link, ends))
        latency = max(each.latency_s for each in ends)
        return Link(name=f"{source}>{destination}", latency=latency, bandwidth=bandwidth)

    def _work(self, least_s: float) -> StepWork:
        """Returns what a micro-batch is to the tasks of a step; gradients of weights are deferred if they take
        `least_s`."""
        is_trained = any(segment.has_backward for segment in self.segments)
        forwards = [
            ForwardWork(
                rank=rank,
                micro_batch=0,
                level=segment.level,
                uses=tuple(sorted(segment.uses)),
                states=(),
                holds=is_trained,
                keeps=segment.has_backward,
            )
            for segment, rank in zip(self.segments, self.ranks, strict=True)
        ]
        numbers = {own: number for number, own in enumerate(self._backwards)}
        feeding = {
            hop.source
            for segment, rank in zip(self.segments, self.ranks, strict=True)
            if not segment.has_backward
            for hop in segment.returned
            if self.ranks[hop.source] != rank
        }
        backwards: list[BackwardWork] = []
        for number in self._backwards:
            segment, flops = self.segments[number], self._costs[number].weight_flops
            is_worth_it = segment.has_weights and is_worth_splitting(flops, self.parts[segment.stage].device, least_s)
            backwards.append(
                BackwardWork(
                    rank=self.ranks[number],
                    micro_batch=0,
                    level=segment.level,
                    forward=number,
                    uses=tuple(sorted({numbers[hop.source] for hop in segment.returned})),
                    accumulates=(number,) if segment.has_weights else (),
                    frees=True,
                    is_worth_splitting=is_worth_it,
                    feeds_another_rank=number in feeding,
                )
            )
        return StepWork(tuple(forwards), tuple(backwards))

    def _timed(self, found: StepTasks, num_backwards: int) -> tuple[Task, ...]:
        """Returns the tasks with what they take here, and what they send."""
        tasks, num_forwards = found.schedule.tasks, len(self.segments)
        split = {
            number % num_backwards for task, number in zip(tasks, found.work, strict=True) if task.kind is Kind.WEIGHT
        }
        timed: list[Task] = []
        for index, task in enumerate(tasks):
            is_forward = task.kind is Kind.FORWARD
            number = found.work[index] % (num_forwards if is_forward else num_backwards)
            own = number if is_forward else self._backwards[number]
            costs = self._costs[own]
            weight_s = costs.weight_s if number in split else 0.0
            sent: tuple[tuple[int, float], ...] = ()
            if is_forward:
                duration, sent = costs.forward_s, self._sent[own]
            elif task.kind is Kind.WEIGHT:
                duration = weight_s
            else:
                duration, sent = costs.backward_s - weight_s, self._returned[own]
                duration += 0.0 if found.leaves_weights(index) else weight_s
            timed.append(
                Task(
                    kind=task.kind,
                    rank=task.rank,
                    micro_batch=task.micro_batch,
                    level=task.level,
                    duration=duration,
                    needs=task.needs,
                    holds=task.holds,
                    memory=task.memory,
                    output_bytes=sent,
                )
            )
        return tuple(timed)


class _Costs(NamedTuple):
    """The costs of nodes for a micro-batch on a device; `weight_s` is how much of the backward can be deferred."""

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
def _scheduled(work: StepWork, count: int, name: str, num_ranks: int, run_ahead: int) -> StepTasks:
    """Returns what the runtime makes of so many micro-batches: the same for all cuts of a chain with the same backwards
    worth splitting.
    """
    return scheduled(work.repeated(count), name, num_ranks, run_ahead)
