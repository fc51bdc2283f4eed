"""The stages of a pipeline as they run, and the step they make: the tasks and orders that the runtime has, played.

A backward is split where the runtime splits it, by the same rule; and gradients go the way they go there, from the
last user of a value to the one before it:

    forward     P --v--> S1,  P --v--> S3           backward    S3 --g--> S1 --sum--> P
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from farspan.cluster import Cluster, DeviceClass
from farspan.plan import Place, format_place
from farspan.planner.costed import CostedEdge, CostedGraph, CostedNode
from farspan.planner.costed.problem import seconds_on
from farspan.planner.forecast.segments import Work, is_row, make_tasks
from farspan.planner.links import Link
from farspan.planner.pipeline import PipelineStage
from farspan.planner.simulate import simulate
from farspan.planner.simulation import Simulation
from farspan.schedule import (
    LEAST_WEIGHT_WORK_S,
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

__all__ = ["Hop", "Part", "make_parts", "play"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A value on its way from one stage to another, or its gradient on its way back.

    Attributes:
        source: Number of the stage that sends.
        target: Number of the stage that receives.
        sent_bytes: What it is on its way.
        held_bytes: What it takes where it has arrived.
        node: Name of the node that made the value.
        is_once: It goes once in a step, before the first task.
    """

    source: int
    target: int
    sent_bytes: float
    held_bytes: float
    node: str
    is_once: bool = False


class Part:
    """The nodes of a stage, as they run there."""

    def __init__(self, graph: CostedGraph, stage: PipelineStage, kind: DeviceClass) -> None:
        inside = set(stage.nodes)
        self.nodes = tuple(node.name for node in graph.nodes if node.name in inside)
        self.kind = kind
        self.rank = 0
        self.host: tuple[str, int] = ("", 0)
        self.remat = tuple(name for name in self.nodes if stage.options.get(name))
        self.chosen = [node.as_run(stage.options.get(node.name, "")) for node in graph.nodes if node.name in inside]
        self.forward_s = sum(seconds_on(replace(node, backward_s=0.0), kind) for node in self.chosen)
        self.backward_s = sum(seconds_on(replace(node, forward_s=0.0), kind) for node in self.chosen)
        self.weight_s = sum(_weight_s(node, kind) for node in self.chosen)
        self.parameter_bytes = sum(node.parameter_bytes for node in self.chosen)
        self.memory_bytes = sum(node.memory_bytes for node in self.chosen)
        self.received: list[Hop] = []
        """Values that come."""
        self.returned: list[Hop] = []
        """Gradients that come."""
        self.is_awaited = False
        """Whether its gradients go to another stage."""
        self.kept_bytes = 0.0
        """By micro-batch: what stays until the backward, because of what is sent and received."""

    @property
    def where(self) -> str:
        return format_place(Place(rank=self.rank, device=self.kind.device or None))

    @property
    def device(self) -> str:
        """The kind that the rule on splitting knows."""
        return self.kind.kind.lower()


def make_parts(graph: CostedGraph, cluster: Cluster, stages: Sequence[PipelineStage]) -> list[Part]:
    """The stages, each with a rank of its class; ranks count host by host, as the cluster names them."""
    kinds = {each.name: each for each in cluster.classes}
    parts = [Part(graph, stage, kinds[stage.device_class]) for stage in stages]
    for kind in cluster.classes:
        own = (part for part in parts if part.kind.name == kind.name)
        for part, (number, host) in zip(own, cluster.devices(kind), strict=False):
            part.rank, part.host = number, (kind.whole, host)
    for rank, part in enumerate(sorted(parts, key=lambda part: part.rank)):
        part.rank = rank
    stage_of = {name: number for number, part in enumerate(parts) for name in part.nodes}
    uses: dict[tuple[str, str], list[CostedEdge]] = {}
    for edge in graph.edges:
        uses.setdefault((edge.source, edge.value), []).append(edge)
    for edges in uses.values():
        _add_borders(parts, stage_of, edges)
    return parts


def _add_borders(parts: Sequence[Part], stage_of: Mapping[str, int], edges: Sequence[CostedEdge]) -> None:
    """The ways of one value, and of its gradient."""
    one, home = edges[0], stage_of[edges[0].source]
    there = sorted({stage_of[edge.target] for edge in edges} - {home})
    if not there:
        return
    has_gradient = one.gradient_bytes != 0
    if not one.is_saved:
        parts[home].kept_bytes += one.size_bytes
    for target in there:
        hop = Hop(
            source=home,
            target=target,
            sent_bytes=one.size_bytes,
            held_bytes=one.size_bytes,
            node=one.source,
            is_once=one.is_parameter,
        )
        parts[target].received.append(hop)
        is_saved = any(edge.is_saved_there for edge in edges if stage_of[edge.target] == target)
        if has_gradient and not is_saved and not one.is_parameter:
            parts[target].kept_bytes += one.size_bytes
    if has_gradient:
        for later, earlier in pairwise([*reversed(there), home]):
            hop = Hop(
                source=later,
                target=earlier,
                sent_bytes=one.sent_back_bytes,
                held_bytes=one.held_back_bytes,
                node=one.source,
            )
            parts[earlier].returned.append(hop)
            parts[later].is_awaited = True


def _weight_s(node: CostedNode, kind: DeviceClass) -> float:
    """Seconds of its backward that can be put off."""
    weights = seconds_on(replace(node, forward_s=0.0, backward_s=node.weight_s), kind)
    return min(weights, seconds_on(replace(node, forward_s=0.0), kind))


def play(
    graph: CostedGraph, cluster: Cluster, parts: Sequence[Part], num_micro_batches: int, schedule: str
) -> Simulation:
    """Play a step of `parts` by the schedule of that name. Where data flow back to a stage, no backward is split."""
    if is_row(graph, [part.nodes for part in parts]):
        tasks = _tasks(parts, num_micro_batches, LEAST_WEIGHT_WORK_S[schedule])
    else:
        ranks = [part.rank for part in parts]
        tasks = make_tasks(graph, [_work_of(part) for part in parts], ranks, num_micro_batches)
    split = {task.needs[0] for task in tasks if task.kind is Kind.WEIGHT}
    nominal = tuple(
        replace(
            task,
            duration=NOMINAL_S * (2 if task.kind is Kind.BACKWARD and index not in split else 1),
            output_bytes=(),
        )
        for index, task in enumerate(tasks)
    )
    first, orders = _orders(schedule, nominal, len(parts))
    tasks = whole_until(tasks, first)
    of_rank = {part.rank: part for part in parts}

    def link_of(source: int, destination: int) -> Link:
        ends = [of_rank[source].kind, of_rank[destination].kind]
        if of_rank[source].host == of_rank[destination].host:
            bandwidth = min(each.within_bytes_per_s for each in ends)
        else:
            bandwidth = min(map(cluster.link, ends))
        latency = max(each.latency_s for each in ends)
        return Link(name=f"{source}>{destination}", latency=latency, bandwidth=bandwidth)

    return simulate(Schedule(tasks=tasks, orders=orders), link_of=link_of)


@lru_cache(maxsize=64)
def _orders(schedule: str, nominal: tuple[Task, ...], num_ranks: int) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """The first micro-batch whose backwards are split, and the orders that the runtime makes then: the same for all
    cuts of a row with the same backwards worth it.
    """
    run_ahead = run_ahead_of(schedule)
    first = split_from(schedule, nominal, num_ranks, run_ahead=run_ahead)
    orders = orders_by_name(schedule, whole_until(nominal, first), num_ranks, run_ahead=run_ahead)
    return first, tuple(map(tuple, orders))


def _work_of(part: Part) -> dict[str, Work]:
    return {
        node.name: Work(
            forward_s=seconds_on(replace(node, backward_s=0.0), part.kind),
            backward_s=seconds_on(replace(node, forward_s=0.0), part.kind),
            saved_bytes=node.saved_bytes,
        )
        for node in part.chosen
    }


def _is_split(part: Part, least_s: float) -> bool:
    """Whether its backward is done in two halves: as runtime.program decides."""
    flops = sum(node.weight_flops for node in part.chosen)
    return part.is_awaited and part.parameter_bytes > 0 and is_worth_splitting(flops, part.device, least_s)


def _tasks(parts: Sequence[Part], num_micro_batches: int, least_s: float) -> tuple[Task, ...]:
    """Per micro-batch the forwards of all stages, then their backwards, the last stage first."""
    tasks: list[Task] = []
    forward, backward = _sent(parts, is_gradient=False), _sent(parts, is_gradient=True)
    for micro_batch in range(num_micro_batches):
        forwards: list[int] = []
        backwards: dict[int, int] = {}
        for stage, part in enumerate(parts):
            sources = {hop.source for hop in part.received if not hop.is_once}
            forwards.append(len(tasks))
            tasks.append(
                Task(
                    kind=Kind.FORWARD,
                    rank=part.rank,
                    micro_batch=micro_batch,
                    level=stage,
                    duration=part.forward_s,
                    needs=tuple(sorted(forwards[source] for source in sources)),
                    holds=True,
                    memory=1.0,
                    output_bytes=forward[stage],
                )
            )
        for stage in reversed(range(len(parts))):
            part = parts[stage]
            is_split = _is_split(part, least_s)
            backwards[stage] = len(tasks)
            users = {backwards[hop.source] for hop in part.returned}
            tasks.append(
                Task(
                    kind=Kind.BACKWARD,
                    rank=part.rank,
                    micro_batch=micro_batch,
                    level=stage,
                    duration=part.backward_s - (part.weight_s if is_split else 0.0),
                    needs=tuple(sorted({forwards[stage], *users})),
                    holds=False,
                    memory=0.0 if is_split else -1.0,
                    output_bytes=backward[stage],
                )
            )
            if is_split:
                weights = replace(
                    tasks[-1],
                    kind=Kind.WEIGHT,
                    duration=part.weight_s,
                    needs=(backwards[stage],),
                    memory=-1.0,
                    output_bytes=(),
                )
                tasks.append(weights)
    return tuple(tasks)


def _sent(parts: Sequence[Part], *, is_gradient: bool) -> list[tuple[tuple[int, float], ...]]:
    """By stage, what each of its tasks sends to which ranks."""
    sizes: list[dict[int, float]] = [{} for _ in parts]
    for part in parts:
        for hop in part.returned if is_gradient else part.received:
            if not hop.is_once:
                sizes[hop.source][part.rank] = sizes[hop.source].get(part.rank, 0.0) + hop.sent_bytes
    return [tuple(sorted(each.items())) for each in sizes]
