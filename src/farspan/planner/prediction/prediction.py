"""Predicts a step under a pipeline: its plan, simulated event by event, and what each stage holds.

Simulated are the schedules that a plan asks for: "auto", which runs a micro-batch ahead to hide transfers and splits
backwards where that pays, and "1f1b", which holds less. "auto" is also simulated with more and more micro-batches
ahead, as long as that makes the step shorter: memory for what a rank would wait for. The shortest of those that fit is
taken.

    one ahead      rank 0   F0 F1 F2 .. .. .. .. B0 F3 B1 F4 B2 ..      while data are on their way, and come back
    three ahead    rank 0   F0 F1 F2 F3 F4 .. .. B0 F5 B1 F6 B2 ..
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from farspan.cluster import Cluster
from farspan.plan import PLANNED_SECONDS, Plan
from farspan.planner.cost_model import CostedGraph
from farspan.planner.model_unit import Unit, placement_of
from farspan.planner.pipeline import Pipeline
from farspan.planner.prediction.parts import Part, Stages
from farspan.planner.prediction.peak_memory import in_flight, peak_bytes, saved_bytes
from farspan.planner.simulation import Simulation
from farspan.schedule import LOOKAHEAD, run_ahead_of

__all__ = ["Prediction", "StagePrediction", "can_run", "predict_step", "shortest_step"]

_SCHEDULES = ("auto", "1f1b")
"""The schedules that are compared."""
_SAME = 1 - 1e-6
_IS_WORTH_MEMORY = 1 - 1e-3
"""More micro-batches in flight make a step shorter by this at least, or they are not simulated further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrediction:
    """The prediction for one stage.

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
class Prediction:
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
    stages: tuple[StagePrediction, ...]
    link_bytes: Mapping[tuple[int, int], float]
    transfer_s: Mapping[tuple[int, int], float]
    num_micro_batches: int

    @property
    def step_s(self) -> float:
        """Predicted seconds from the first task to the last."""
        return self.simulation.step_time

    @property
    def fits(self) -> bool:
        """Returns whether every stage has the memory that it needs."""
        return all(stage.memory_bytes <= stage.limit_bytes for stage in self.stages)

    @property
    def bubble(self) -> float:
        """The share of all devices' time in which they do not compute."""
        return 1.0 - sum(stage.busy for stage in self.stages) / len(self.stages)


def can_run(pipeline: Pipeline) -> bool:
    """Returns whether it has one device for each stage, as plans have where nobody asks for wide stages."""
    return all(stage.replicas == stage.tensor_parallel == 1 for stage in pipeline.stages)


def predict_step(
    graph: CostedGraph,
    cluster: Cluster,
    pipeline: Pipeline,
    num_micro_batches: int,
    *,
    schedules: Sequence[str] = _SCHEDULES,
    reduction: str | None = "exact",
) -> Prediction:
    """Simulate a step of `pipeline`, whose stages have one device each, or several that take micro-batches in turn.

    Args:
        graph: Its nodes are modules or parameters of the model.
        cluster: Where it runs.
        pipeline: Found for that graph and cluster.
        num_micro_batches: Of a step.
        schedules: Names of those to compare.
        reduction: How gradients of wide stages are added up, "exact" or "sum". None: exactly, where that hides behind
            compute.
    """
    stages = Stages(graph, cluster, pipeline.stages, reduction or "exact")
    if reduction is None and any(stages.gradients_s(part) > part.forward_s + part.backward_s for part in stages.parts):
        stages.reduction = "sum"
    best = _best_schedule(stages, num_micro_batches, schedules)
    simulation = best.simulation
    link_bytes: dict[tuple[int, int], float] = {}
    transfer_s: dict[tuple[int, int], float] = {}
    for transfer in simulation.transfers:
        channel = transfer.message.channel
        ends = (channel.source, channel.destination)
        link_bytes[ends] = link_bytes.get(ends, 0.0) + transfer.message.size_bytes
        transfer_s[ends] = transfer_s.get(ends, 0.0) + transfer.free - transfer.start
    return Prediction(
        plan=_plan(graph, best, stages.reduction),
        pipeline=pipeline,
        simulation=simulation,
        stages=best.stages,
        link_bytes=link_bytes,
        transfer_s=transfer_s,
        num_micro_batches=num_micro_batches,
    )


def shortest_step(graph: CostedGraph, cluster: Cluster, pipeline: Pipeline, num_micro_batches: int) -> float:
    """Returns seconds of a step of `pipeline`, whether it fits or not."""
    stages = Stages(graph, cluster, pipeline.stages)
    return min(each.step_time for _, _, each in _simulations(stages, num_micro_batches, _SCHEDULES))


class _Run(NamedTuple):
    """The way stages are run, and what comes of it."""

    schedule: str
    lookahead: int
    simulation: Simulation
    stages: tuple[StagePrediction, ...]

    @property
    def fits(self) -> bool:
        return all(stage.memory_bytes <= stage.limit_bytes for stage in self.stages)


def _simulations(
    stages: Stages, num_micro_batches: int, schedules: Sequence[str]
) -> Iterator[tuple[str, int, Simulation]]:
    """Simulates the step with each schedule: its name, the lookahead, the step."""
    for schedule in schedules:
        lookahead = LOOKAHEAD
        simulation = stages.simulate(num_micro_batches, schedule, lookahead)
        yield schedule, lookahead, simulation
        while schedule == "auto" and run_ahead_of(schedule, lookahead) < num_micro_batches - 1:
            shortest_s = simulation.step_time
            lookahead *= 2
            simulation = stages.simulate(num_micro_batches, schedule, lookahead)
            if simulation.step_time >= shortest_s * _IS_WORTH_MEMORY:
                break
            yield schedule, lookahead, simulation


def _best_schedule(stages: Stages, num_micro_batches: int, schedules: Sequence[str]) -> _Run:
    """Returns the shortest step that fits, else the one by the last schedule, which holds least."""
    found: list[_Run] = []
    for schedule, lookahead, simulation in _simulations(stages, num_micro_batches, schedules):
        peaks = peak_bytes(stages, simulation, schedule, lookahead)
        parts = tuple(_stage(stages, part, simulation, peaks) for part in stages.parts)
        found.append(_Run(schedule, lookahead, simulation, parts))
    fitting = [each for each in found if each.fits]
    if not fitting:
        return found[-1]
    best = fitting[0]
    for each in fitting[1:]:
        best = each if each.simulation.step_time < best.simulation.step_time * _SAME else best
    return best


def _stage(stages: Stages, part: Part, simulation: Simulation, peaks: Mapping[int, float]) -> StagePrediction:
    return StagePrediction(
        where=part.where,
        device=part.kind.whole,
        nodes=part.nodes,
        remat=part.remat,
        forward_s=part.forward_s,
        backward_s=part.backward_s,
        parameter_bytes=part.parameter_bytes,
        saved_bytes=saved_bytes(stages, part),
        in_flight=max(in_flight(simulation, rank) for rank in part.ranks),
        memory_bytes=max(peaks[rank] for rank in part.ranks),
        limit_bytes=part.kind.memory_bytes,
        busy=sum(map(simulation.busy, part.ranks)) / part.width / simulation.step_time if simulation.step_time else 0.0,
    )


def _plan(graph: CostedGraph, run: _Run, reduction: str) -> Plan:
    stages = run.stages
    stage_of = {name: number for number, stage in enumerate(stages) for name in stage.nodes}
    nodes = graph.nodes
    if len(stages) == 1:
        placement = {"": 0}
    else:
        units = [Unit(name=node.name, cost=0.0) for node in nodes]
        placement = placement_of(units, [stage_of[node.name] for node in nodes])
    return Plan(
        stages=tuple(stage.where for stage in stages),
        placement=placement,
        schedule=run.schedule,
        lookahead=run.lookahead,
        gradient_reduction=reduction,
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
