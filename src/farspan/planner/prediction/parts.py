"""The stages of a pipeline as they run, and the step they make: the tasks and orders of the runtime, simulated.

Both are made by `program.tasks`, of the same numbers: what is predicted is what runs.

Of a wide stage each parameter has one owner. Its other members get the value before their first forward of a step, and
send gradients home: with each micro-batch, beside the next one's tasks ("exact"), or once, behind the last ("sum").

    rank 0   value | F0 .. B0 F2 .. B2 | gradient         what is not hidden is added to the first and the last task
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from farspan.cluster import Cluster, DeviceClass
from farspan.plan import Place, format_places
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
    """A stage on its devices, several where it is wide.

    Attributes:
        nodes: Names of what runs there.
        kind: Its devices' class.
        width: How many devices take micro-batches in turn.
        rank: The number of the first one, as ranks count; the others follow.
        hosts: Class and number of the host of each.
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
        self.width = stage.replicas
        self.rank = 0
        self.hosts: list[tuple[str, int]] = []
        self.remat = tuple(name for name in self.nodes if stage.options.get(name))
        self.chosen = [node.as_run(stage.options.get(node.name, "")) for node in graph.nodes if node.name in inside]
        self.costs_of = {node.name: _costs(node, kind) for node in self.chosen}
        self.forward_s = sum(each.forward_s for each in self.costs_of.values())
        self.backward_s = sum(each.backward_s for each in self.costs_of.values())
        self.parameter_bytes = sum(node.parameter_bytes for node in self.chosen)
        self.memory_bytes = sum(node.memory_bytes for node in self.chosen)

    @property
    def where(self) -> str:
        return format_places(tuple([Place(rank=rank, device=self.kind.device or None) for rank in self.ranks]))

    @property
    def ranks(self) -> range:
        return range(self.rank, self.rank + self.width)

    @property
    def exchanged_bytes(self) -> float:
        """What a member has not of the stage's parameters, about, and gets or gives in a step."""
        return self.parameter_bytes * (self.width - 1) / self.width

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
        ranks: The rank of each segment; of a wide stage the first.
        reduction: How gradients of wide stages are added up: "exact" or "sum".
    """

    def __init__(
        self, graph: CostedGraph, cluster: Cluster, stages: Sequence[PipelineStage], reduction: str = "exact"
    ) -> None:
        kinds = {each.name: each for each in cluster.classes}
        self.cluster = cluster
        self.reduction = reduction
        self.parts = [Part(graph, stage, kinds[stage.device_class]) for stage in stages]
        self._give_ranks()
        self.segments = make_segments(graph, [part.chosen for part in self.parts])
        self.ranks = [self.parts[segment.stage].rank for segment in self.segments]
        self._costs = [_costs_of(segment.nodes, self.parts[segment.stage]) for segment in self.segments]
        self._backwards = [
            number for number in reversed(range(len(self.segments))) if self.segments[number].has_backward
        ]
        """Segments in the order of their backwards."""
        self._part_of = {rank: part for part in self.parts for rank in part.ranks}
        self.num_ranks = len(self._part_of)
        self._sent = self._bytes_by_rank(is_gradient=False)
        self._returned = self._bytes_by_rank(is_gradient=True)

    def _give_ranks(self) -> None:
        """Give each stage a device of its class; ranks count host by host, as the cluster names them."""
        for kind in self.cluster.classes:
            own = [part for part in self.parts if part.kind.name == kind.name]
            devices = list(self.cluster.devices(kind))
            first = 0
            for part in own:
                mine = devices[first : first + part.width]
                part.rank, part.hosts = mine[0][0], [(kind.whole, host) for _, host in mine]
                first += part.width
        rank = 0
        for part in sorted(self.parts, key=lambda part: part.rank):
            part.rank, rank = rank, rank + part.width

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
        found = _scheduled(work, num_micro_batches, schedule, self.num_ranks, run_ahead)
        tasks = self._timed(found, len(work.backwards))
        return simulate(Schedule(tasks=tasks, orders=found.schedule.orders), link_of=self._link)

    def _link(self, source: int, destination: int) -> Link:
        one, other = self._part_of[source], self._part_of[destination]
        ends = [one.kind, other.kind]
        if one.hosts[source - one.rank] == other.hosts[destination - other.rank]:
            bandwidth = min(each.within_bytes_per_s for each in ends)
        else:
            bandwidth = min(map(self.cluster.link, ends))
        latency = max(each.latency_s for each in ends)
        return Link(name=f"{source}>{destination}", latency=latency, bandwidth=bandwidth)

    def gradients_s(self, part: Part) -> float:
        """Returns how long a micro-batch's gradients of a wide stage are on the wire to other members."""
        links = [self._link(part.rank, rank) for rank in part.ranks[1:]]
        return max((part.exchanged_bytes / link.bandwidth + link.latency for link in links), default=0.0)

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
                width=self.parts[segment.stage].width,
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
            part = self.parts[segment.stage]
            is_worth_it = segment.has_weights and part.width == 1 and is_worth_splitting(flops, part.device, least_s)
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
                    width=part.width,
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
                duration, sent = costs.forward_s, self._taken(self._sent[own], task.micro_batch)
            elif task.kind is Kind.WEIGHT:
                duration = weight_s
            else:
                duration, sent = costs.backward_s - weight_s, self._taken(self._returned[own], task.micro_batch)
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
        return self._with_exchange(tuple(timed), found.schedule.orders)

    def _taken(self, sent: Sequence[tuple[int, float]], micro_batch: int) -> tuple[tuple[int, float], ...]:
        """Returns what is sent, to the members of wide stages whose turn it is."""
        return tuple([(rank + micro_batch % self._part_of[rank].width, size) for rank, size in sent])

    def _with_exchange(self, tasks: tuple[Task, ...], orders: Sequence[Sequence[int]]) -> tuple[Task, ...]:
        """Returns the tasks, of wide stages with the time that values and gradients take and nothing hides."""
        found = list(tasks)
        for rank, part in self._part_of.items():
            order = orders[rank]
            if part.width == 1 or not order or not part.parameter_bytes:
                continue
            own = [index for index in order if tasks[index].kind is not Kind.FORWARD]
            values_s = gradients_s = self.gradients_s(part)
            if self.reduction == "exact":  # of all but the last one what takes longer than the next micro-batch
                gradients_s += max(0, len(own) - 1) * max(0.0, gradients_s - part.forward_s - part.backward_s)
            for index, seconds in [(order[0], values_s), *[(index, gradients_s) for index in own[-1:]]]:
                found[index] = replace(found[index], duration=found[index].duration + seconds)
        return tuple(found)


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
