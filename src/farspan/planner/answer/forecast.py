"""What a step will be like under a pipeline: its plan, played event by event, and what each stage holds.

    peak memory of a stage = parameters, gradients, optimizer state + micro-batches in flight * saved activations
                           + micro-batches in flight * what is sent on and not saved anyway
                           + what is received ahead, and its gradient of the last one, until the next is sent
                           + what one piece needs while it runs, less what those after it have given back by then

in flight by the schedule that the plan asks for: "auto" runs a micro-batch ahead to hide transfers, where that fits. Of
a micro-batch that has run only some of a stage's segments, the share that these save is in flight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from farspan.cluster import Cluster, DeviceClass
from farspan.plan import PLANNED_SECONDS, Place, Plan, format_place
from farspan.planner.answer.segments import Work, make_tasks
from farspan.planner.atoms import Atom, placement_of
from farspan.planner.costed import CostedGraph, CostedNode
from farspan.planner.costed.problem import seconds_on
from farspan.planner.links import Link
from farspan.planner.pipeline import Pipeline, PipelineStage
from farspan.planner.simulate import simulate
from farspan.planner.simulation import Simulation
from farspan.schedule import Kind, Schedule, orders_by_name

__all__ = ["Forecast", "StageForecast", "can_run", "forecast"]

_RUN_AHEAD = 1
_SAME = 1 - 1e-9
_NOMINAL = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}
"""Durations that the runtime makes the orders for: all ranks know them, and noise does not change them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageForecast:
    """One stage.

    Attributes:
        where: "rank:0".
        device: The class of its device.
        nodes: Names of what runs there.
        remat: Those that are computed again in the backward.
        forward_s: Seconds of a micro-batch.
        backward_s: The same of its backward.
        parameter_bytes: What is trained there.
        saved_bytes: What each micro-batch in flight keeps.
        in_flight: The most micro-batches at once.
        memory_bytes: At its peak.
        limit_bytes: What the device has.
        busy: The share of the step in which it computes.
    """

    where: str
    device: str
    nodes: tuple[str, ...]
    remat: tuple[str, ...]
    forward_s: float
    backward_s: float
    parameter_bytes: float
    saved_bytes: float
    in_flight: int
    memory_bytes: float
    limit_bytes: float
    busy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A pipeline that distribute can run, and the step it will give.

    Attributes:
        plan: For `farspan.distribute(plan=...)`.
        pipeline: What the search has found.
        simulation: The step.
        stages: In order.
        link_bytes: What each link carries in a step, by (rank, rank).
        transfer_s: How long each link is busy with it.
        num_micro_batches: Of a step.
    """

    plan: Plan
    pipeline: Pipeline
    simulation: Simulation
    stages: tuple[StageForecast, ...]
    link_bytes: Mapping[tuple[int, int], float]
    transfer_s: Mapping[tuple[int, int], float]
    num_micro_batches: int

    @property
    def step_s(self) -> float:
        """Predicted seconds from the first task to the last."""
        return self.simulation.step_time

    @property
    def fits(self) -> bool:
        """Whether every stage has the memory that it needs."""
        return all(stage.memory_bytes <= stage.limit_bytes for stage in self.stages)

    @property
    def bubble(self) -> float:
        """The share of all devices' time in which they do not compute."""
        return 1.0 - sum(stage.busy for stage in self.stages) / len(self.stages)


def can_run(pipeline: Pipeline) -> bool:
    """Whether distribute can run it: one device for each stage."""
    return all(stage.replicas == stage.tensor_parallel == 1 for stage in pipeline.stages)


def forecast(graph: CostedGraph, cluster: Cluster, pipeline: Pipeline, num_micro_batches: int) -> Forecast:
    """Play a step of `pipeline`, of which each stage has one device.

    Args:
        graph: Its nodes are modules or parameters of the model.
        cluster: Where it runs.
        pipeline: Found for that graph and cluster.
        num_micro_batches: Of a step.
    """
    kinds = {each.name: each for each in cluster.classes}
    parts = [_Part(graph, stage, kinds[stage.device_class]) for stage in pipeline.stages]
    _add_borders(graph, parts)
    _number_ranks(cluster, parts)
    simulation, schedule = _play(graph, cluster, parts, num_micro_batches, "auto"), "auto"
    if any(part.peak(simulation.peak_memory(part.rank)) > part.kind.memory_bytes for part in parts):
        simulation, schedule = _play(graph, cluster, parts, num_micro_batches, "1f1b"), "1f1b"
    stages = tuple(_stage(part, simulation) for part in parts)
    link_bytes: dict[tuple[int, int], float] = {}
    transfer_s: dict[tuple[int, int], float] = {}
    for transfer in simulation.transfers:
        channel = transfer.message.channel
        ends = (channel.source, channel.destination)
        link_bytes[ends] = link_bytes.get(ends, 0.0) + transfer.message.size_bytes
        transfer_s[ends] = transfer_s.get(ends, 0.0) + transfer.free - transfer.start
    return Forecast(
        plan=_plan(graph, stages, schedule),
        pipeline=pipeline,
        simulation=simulation,
        stages=stages,
        link_bytes=link_bytes,
        transfer_s=transfer_s,
        num_micro_batches=num_micro_batches,
    )


class _Part:
    """The nodes of a stage, as they run there."""

    def __init__(self, graph: CostedGraph, stage: PipelineStage, kind: DeviceClass) -> None:
        inside = set(stage.nodes)
        self.nodes = tuple(node.name for node in graph.nodes if node.name in inside)
        self.kind = kind
        self.rank = 0
        self.host: tuple[str, int] = ("", 0)
        self.remat = tuple(name for name in self.nodes if stage.options.get(name))
        chosen = [_as_run(node, stage.options.get(node.name, "")) for node in graph.nodes if node.name in inside]
        self.work = {
            node.name: Work(
                forward_s=seconds_on(replace(node, backward_s=0.0), kind),
                backward_s=seconds_on(replace(node, forward_s=0.0), kind),
                saved_bytes=node.saved_bytes,
            )
            for node in chosen
        }
        self.forward_s = sum(each.forward_s for each in self.work.values())
        self.backward_s = sum(each.backward_s for each in self.work.values())
        self.saved_bytes = sum(node.saved_bytes for node in chosen)
        self.memory_bytes = sum(node.memory_bytes for node in chosen)
        self.parameter_bytes = sum(node.parameter_bytes for node in chosen)
        self.sent_bytes = self.received_bytes = 0.0
        """By micro-batch: what is sent on and not saved anyway; what comes."""
        self.working_bytes = _working_bytes(chosen)

    @property
    def where(self) -> str:
        return format_place(Place(rank=self.rank, device=self.kind.device or None))

    def peak(self, in_flight: float) -> float:
        kept = in_flight * (self.saved_bytes + self.sent_bytes)
        return self.memory_bytes + kept + 2 * self.received_bytes + self.working_bytes


def _working_bytes(nodes: Sequence[CostedNode]) -> float:
    """The most that a stage needs besides what it keeps: in its backward, node by node, which then give back."""
    most = given_back = 0.0
    for node in reversed(nodes):
        most = max(most, node.working_bytes - given_back)
        given_back += node.saved_bytes
    return most


def _add_borders(graph: CostedGraph, parts: Sequence[_Part]) -> None:
    stage_of = {name: number for number, part in enumerate(parts) for name in part.nodes}
    sent: set[tuple[str, str]] = set()
    received: set[tuple[str, str, int]] = set()
    for edge in graph.edges:
        source, target = stage_of[edge.source], stage_of[edge.target]
        if source == target:
            continue
        if (edge.source, edge.value) not in sent and not edge.is_saved:
            sent.add((edge.source, edge.value))
            parts[source].sent_bytes += edge.size_bytes
        if (edge.source, edge.value, target) not in received:
            received.add((edge.source, edge.value, target))
            parts[target].received_bytes += edge.size_bytes


def _as_run(node: CostedNode, option: str) -> CostedNode:
    for each in node.options:
        if each.name == option and each.tensor_parallel == 1:
            return replace(
                node,
                forward_s=each.forward_s,
                backward_s=each.backward_s,
                saved_bytes=each.saved_bytes,
                memory_bytes=each.memory_bytes,
                working_bytes=node.working_bytes + max(0.0, node.saved_bytes - each.saved_bytes),  # computed again
            )
    return node


def _stage(part: _Part, simulation: Simulation) -> StageForecast:
    held = simulation.peak_memory(part.rank)  # in micro-batches
    return StageForecast(
        where=part.where,
        device=part.kind.whole,
        nodes=part.nodes,
        remat=part.remat,
        forward_s=part.forward_s,
        backward_s=part.backward_s,
        parameter_bytes=part.parameter_bytes,
        saved_bytes=part.saved_bytes,
        in_flight=math.ceil(held * _SAME),
        memory_bytes=part.peak(held),
        limit_bytes=part.kind.memory_bytes,
        busy=simulation.busy(part.rank) / simulation.step_time if simulation.step_time else 0.0,
    )


def _number_ranks(cluster: Cluster, parts: Sequence[_Part]) -> None:
    """Give each stage a device of its class, in turn; ranks count host by host, as the cluster names them."""
    for kind in cluster.classes:
        own = (part for part in parts if part.kind.name == kind.name)
        for part, (number, host) in zip(own, cluster.devices(kind), strict=False):
            part.rank, part.host = number, (kind.whole, host)
    for rank, part in enumerate(sorted(parts, key=lambda part: part.rank)):
        part.rank = rank


def _play(
    graph: CostedGraph,
    cluster: Cluster,
    parts: Sequence[_Part],
    num_micro_batches: int,
    schedule: str,
) -> Simulation:
    ranks = [part.rank for part in parts]
    tasks = make_tasks(graph, [part.work for part in parts], ranks, num_micro_batches)
    ahead = _RUN_AHEAD if schedule == "auto" else 0
    nominal = tuple(replace(task, duration=_NOMINAL[task.kind]) for task in tasks)
    orders = orders_by_name(schedule, nominal, len(parts), run_ahead=ahead)
    of_rank = {part.rank: part for part in parts}

    def link_of(source: int, destination: int) -> Link:
        ends = [of_rank[source].kind, of_rank[destination].kind]
        if of_rank[source].host == of_rank[destination].host:
            bandwidth = min(each.within_bytes_per_s for each in ends)
        else:
            bandwidth = min(map(cluster.link, ends))
        latency = max(each.latency_s for each in ends)
        return Link(name=f"{source}>{destination}", latency=latency, bandwidth=bandwidth)

    return simulate(Schedule(tasks=tasks, orders=tuple(map(tuple, orders))), link_of=link_of)


def _plan(graph: CostedGraph, stages: Sequence[StageForecast], schedule: str) -> Plan:
    stage_of = {name: number for number, stage in enumerate(stages) for name in stage.nodes}
    nodes = graph.nodes
    if len(stages) == 1:
        placement = {"": 0}
    else:
        atoms = [Atom(name=node.name, cost=0.0) for node in nodes]
        placement = placement_of(atoms, [stage_of[node.name] for node in nodes])
    return Plan(
        stages=tuple(stage.where for stage in stages),
        placement=placement,
        schedule=schedule,
        remat=tuple(name for stage in stages for name in stage.remat) or False,
        estimates={
            "parameter_bytes": [stage.parameter_bytes for stage in stages],
            "peak_bytes": [stage.memory_bytes for stage in stages],
            **(
                {"limit_bytes": [stage.limit_bytes for stage in stages]}
                if all(math.isfinite(stage.limit_bytes) for stage in stages)
                else {}
            ),
            "busy": [round(stage.busy, 4) for stage in stages],
            PLANNED_SECONDS: [stage.forward_s + stage.backward_s for stage in stages],
        },
    )
