"""What a step will be like under a pipeline: its plan, played event by event, and what each stage holds.

    peak memory of a stage = parameters, gradients, optimizer state + micro-batches in flight * saved activations
                           + micro-batches in flight * what is sent on and not saved anyway
                           + what is received ahead, and its gradient of the last one, until the next is sent
                           + what one piece needs while it runs, less what those after it have given back by then

in flight by the schedule that the plan asks for: "auto" runs a micro-batch ahead to hide transfers, where that fits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from farspan.cluster import Cluster, DeviceClass
from farspan.plan import PLANNED_SECONDS, Plan
from farspan.planner.auto import Atom, placement_of
from farspan.planner.costed import CostedGraph, CostedNode
from farspan.planner.costed.problem import seconds_on
from farspan.planner.links import Link
from farspan.planner.pipeline import Pipeline, PipelineStage
from farspan.planner.simulate import simulate
from farspan.planner.simulation import Simulation
from farspan.schedule import Kind, Schedule, Task, orders_by_name

__all__ = ["WHOLE_MODEL", "Forecast", "StageForecast", "can_run", "forecast"]

WHOLE_MODEL = "(the model)"
"""Name of the node of a model that is one piece."""
_RUN_AHEAD = 1
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
    if any(part.peak(simulation.peak_micro_batches(part.rank)) > part.kind.memory_bytes for part in parts):
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
        self.forward_s = sum(seconds_on(replace(node, backward_s=0.0), kind) for node in chosen)
        self.backward_s = sum(seconds_on(replace(node, forward_s=0.0), kind) for node in chosen)
        self.saved_bytes = sum(node.saved_bytes for node in chosen)
        self.memory_bytes = sum(node.memory_bytes for node in chosen)
        self.parameter_bytes = sum(node.parameter_bytes for node in chosen)
        self.sent_bytes = self.received_bytes = 0.0
        """By micro-batch: what is sent on and not saved anyway; what comes."""
        self.working_bytes = _working_bytes(chosen)

    def peak(self, in_flight: int) -> float:
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
    in_flight = simulation.peak_micro_batches(part.rank)
    return StageForecast(
        where=f"rank:{part.rank}",
        device=part.kind.name,
        nodes=part.nodes,
        remat=part.remat,
        forward_s=part.forward_s,
        backward_s=part.backward_s,
        parameter_bytes=part.parameter_bytes,
        saved_bytes=part.saved_bytes,
        in_flight=in_flight,
        memory_bytes=part.peak(in_flight),
        limit_bytes=part.kind.memory_bytes,
        busy=simulation.busy(part.rank) / simulation.step_time if simulation.step_time else 0.0,
    )


def _number_ranks(cluster: Cluster, parts: Sequence[_Part]) -> None:
    """Give each stage a device of its class, in turn; ranks count host by host, as the cluster names them."""
    rank = 0
    for kind in cluster.classes:
        for number, part in enumerate(part for part in parts if part.kind.name == kind.name):
            part.rank, part.host = rank, (kind.name, number // kind.devices_per_host)
            rank += 1


def _play(
    graph: CostedGraph,
    cluster: Cluster,
    parts: Sequence[_Part],
    num_micro_batches: int,
    schedule: str,
) -> Simulation:
    passed = _passed(graph, parts)
    tasks = _tasks(parts, passed, num_micro_batches)
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


def _passed(graph: CostedGraph, parts: Sequence[_Part]) -> dict[tuple[int, int], float]:
    """Bytes that go from one stage to another in the forward of a micro-batch; each value once to each stage."""
    stage_of = {name: number for number, part in enumerate(parts) for name in part.nodes}
    values: dict[tuple[str, str, int], tuple[int, float]] = {}
    for edge in graph.edges:
        source, target = stage_of[edge.source], stage_of[edge.target]
        if source != target:
            values[edge.source, edge.value, target] = (source, edge.size_bytes)
    passed: dict[tuple[int, int], float] = {}
    for (_, _, target), (source, size) in values.items():
        passed[source, target] = passed.get((source, target), 0.0) + size
    return passed


def _tasks(parts: Sequence[_Part], passed: Mapping[tuple[int, int], float], num_micro_batches: int) -> tuple[Task, ...]:
    """Per micro-batch the forwards of all stages, then their backwards, the last stage first."""
    count = len(parts)
    tasks: list[Task] = []
    for micro_batch in range(num_micro_batches):
        first = micro_batch * 2 * count

        def forward(stage: int, first: int = first) -> int:
            return first + stage

        def backward(stage: int, first: int = first) -> int:
            return first + 2 * count - 1 - stage

        for stage, part in enumerate(parts):
            tasks.append(
                Task(
                    kind=Kind.FORWARD,
                    rank=part.rank,
                    micro_batch=micro_batch,
                    level=stage,
                    duration=part.forward_s,
                    needs=tuple(sorted(forward(source) for source, target in passed if target == stage)),
                    holds=True,
                    memory=1.0,
                    output_bytes=max((size for (source, _), size in passed.items() if source == stage), default=0.0),
                )
            )
        for stage in reversed(range(count)):
            users = [backward(target) for source, target in passed if source == stage]
            tasks.append(
                Task(
                    kind=Kind.BACKWARD,
                    rank=parts[stage].rank,
                    micro_batch=micro_batch,
                    level=stage,
                    duration=parts[stage].backward_s,
                    needs=tuple(sorted([forward(stage), *users])),
                    holds=False,
                    memory=-1.0,
                    output_bytes=max((size for (_, target), size in passed.items() if target == stage), default=0.0),
                )
            )
    return tuple(tasks)


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
