"""Computes the cost of a stage that runs as several replicas, each on several devices, with remat where memory asks for
it.

For a stage S on r replicas of t devices of class c, with R micro-batches for the whole step and s replicas in this and
all later stages (1F1B: s / r micro-batches are in flight in each replica):

    once(S)   = seconds of all nodes, at degree t, with the remat that memory asks for
              + passes * (bytes over the border of S) / bandwidth            one micro-batch, start to end
    sync(S)   = sync_passes * (r - 1) / r * parameter bytes / bandwidth      once a step: replicas agree on gradients
    rate(S)   = once(S) / r + sync(S) / R                                    seconds for each micro-batch, steadily
    memory(S) = sum of memory_bytes + ceil(s / r) * sum of saved_bytes
              + the largest working_bytes                                    of each device

The bottleneck objective (PipeDream, Piper: time per sample) is the largest rate. The time of a step of a pipeline that
starts and ends empty is

    sum over S of once(S) + max over S of ((R / r - 1) once(S) + sync(S))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from farspan.cluster import Cluster
from farspan.planner.cost_model.colocation import FloatArray
from farspan.planner.cost_model.costed_graph import CostedEdge, CostedGraph
from farspan.planner.partition_dp.chain import IntArray, StageOption, Step
from farspan.planner.partition_dp.crossings import Crossings
from farspan.planner.partition_dp.degree import Degree
from farspan.planner.partition_dp.lattice import Lattice
from farspan.planner.partition_dp.remat import Choice

__all__ = ["Quantity", "QuantityLoads", "Rules", "StageLoads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of a step.

    Attributes:
        micro_batches: In a step, over all replicas; the replicas of a stage divide it.
        passes: How often a value crosses a border: forward, and its gradient back.
        sync_passes: Bytes that a replica moves to agree on gradients, as a multiple of (r - 1) / r of them: 2 in a
            ring, 4 in the model of PipeDream and Piper.
        max_replicas: The most replicas of a stage; None for no limit.
        num_stages: How many stages, where these have one device each; None for any number.
        least: By name of a class, how many of its devices must have a stage, where stages have one device each.
        most_in_flight: The most micro-batches that a replica is taken to hold; None for as many as 1F1B makes it hold.
        counts_working: Whether a stage needs memory for what the largest of its nodes needs while it runs.
    """

    micro_batches: int = 8
    passes: float = 2.0
    sync_passes: float = 2.0
    max_replicas: int | None = None
    num_stages: int | None = None
    least: Mapping[str, int] = field(default_factory=dict[str, int])
    most_in_flight: int | None = None
    counts_working: bool = True

    def times_moved(self, edge: CostedEdge) -> float:
        """Returns how often a value goes along an edge, or its gradient back, for each micro-batch."""
        forward = min(self.passes, 1.0)
        back = self.passes - forward if edge.has_gradient else 0.0
        return back + (forward / self.micro_batches if edge.is_parameter else forward)


_MAX_CACHE = 300_000_000


Quantity = Literal["rate", "fill", "drain"]
"""A cost of a stage: rate(S) for each micro-batch; fill(S), once; drain(S) = (R / r - 1) fill(S) + sync(S)."""


class StageLoads:
    """The costs of stages; `of` gives one quantity of them as loads for `best_chain`.

    Args:
        graph: What to place.
        cluster: Where.
        group_of: [node] its group.
        lattice: Of the groups.
        rules: What a step is.
        unit: Replicas come in multiples of this number, and devices of a class in units of so many.
        max_depth: Replicas in all stages together, in units, that are told apart.
        relaxed: Lower bounds instead of what the best known choice of remat costs.
        is_near: Whether a transfer is taken to go to the nearest device, and not to any.
    """

    def __init__(
        self,
        graph: CostedGraph,
        cluster: Cluster,
        group_of: Sequence[int],
        lattice: Lattice,
        rules: Rules,
        *,
        unit: int = 1,
        max_depth: int = 64,
        relaxed: bool = False,
        is_near: bool = False,
    ) -> None:
        self.lattice, self.rules, self.unit, self.relaxed = lattice, rules, unit, relaxed
        self.cluster, self.is_near = cluster, is_near
        self.num_prefixes = len(lattice.prefixes)
        self._members = lattice.members()
        degrees = sorted({1, *(option.tensor_parallel for node in graph.nodes for option in node.options)})
        most_replicas = rules.micro_batches // unit  # of a stage, in units
        useful = self._members.shape[1] * most_replicas * degrees[-1]
        self.counts = tuple(min(each.num_devices // unit, useful) for each in cluster.classes)
        self.degrees: dict[tuple[int, int], Degree] = {}
        self.options: list[StageOption] = []
        has_limit = False
        for index, kind in enumerate(cluster.classes):
            for degree in degrees:
                if degree > kind.devices_per_host or degree > self.counts[index] * unit:
                    continue
                self.degrees[index, degree] = Degree(
                    graph, group_of, self._members, kind, degree, counts_working=rules.counts_working
                )
                has_limit |= math.isfinite(kind.memory_bytes)
                most = min(self.counts[index] // degree, most_replicas)
                self.options += [
                    StageOption(device_class=index, replicas=replicas, tensor_parallel=degree)
                    for replicas in range(1, most + 1)
                    if rules.micro_batches % (replicas * unit) == 0
                    and (rules.max_replicas is None or replicas * unit <= rules.max_replicas)
                ]
        self.num_depths = min(sum(self.counts), max_depth) + 1 if has_limit else 1
        self._leave_out_lone_classes(group_of)
        self.may_remain = self._may_remain()
        """[devices of each class that is counted] whether so many may be without a stage; None for any."""
        self._transfers = _transfers(graph, group_of, lattice, rules)
        units = sorted({option.replicas for option in self.options})
        in_flight = {each: [self.in_flight(depth, each) for depth in range(self.num_depths)] for each in units}
        self.flights = sorted({count for counts in in_flight.values() for count in counts})
        self._flight_of = {each: np.searchsorted(self.flights, counts) for each, counts in in_flight.items()}
        self._cache: dict[int, _Stages] = {}

    def only(self, device_class: int, *, exactly: int | None = None) -> StageLoads:
        """Returns the same with stages on that class, as class 0, and on those that are not counted; on so many
        devices."""
        other = copy(self)
        lone = {option.device_class for option in self.options if not option.is_counted}
        number = {index: at for at, index in enumerate([device_class, *sorted(lone)])}
        other.options = [
            replace(option, device_class=number[option.device_class])
            for option in self.options
            if option.device_class in number
        ]
        other.degrees = {
            (number[index], degree): self.degrees[index, degree]
            for index, degree in sorted(self.degrees, key=lambda key: key[0] != device_class)
            if index in number
        }
        other.counts = (self.counts[device_class] if exactly is None else exactly, *(0 for _ in lone))
        least = self.least(device_class) if exactly is None else exactly
        other.may_remain = np.indices([count + 1 for count in other.counts])[0] <= other.counts[0] - least
        other._cache = {}
        return other

    def least(self, device_class: int) -> int:
        """Returns how many devices of a class must have a stage, of those that are counted."""
        return min(self.rules.least.get(self.cluster.classes[device_class].name, 0), self.counts[device_class])

    @property
    def num_lone(self) -> int:
        """Returns how many stages are on classes that are not counted."""
        return len({option.device_class for option in self.options if not option.is_counted})

    def _leave_out_lone_classes(self, group_of: Sequence[int]) -> None:
        """Do not count a class of one device if there is one group that may run nowhere else.

        Its stage is the one with that group: whether it is used already shows in the prefix.
        """
        groups: dict[int, set[int]] = {}
        for node, group in enumerate(group_of):
            classes = {index for (index, _), each in self.degrees.items() if each.choices[node]}
            if len(classes) == 1:
                groups.setdefault(classes.pop(), set()).add(group)
        lone = {
            index: next(iter(found))
            for index, found in groups.items()
            if len(found) == 1 and self.counts[index] == self.unit == 1
        }
        for (index, _), degree in self.degrees.items():
            degree.only_with = lone.get(index)
        self.options = [replace(each, is_counted=each.device_class not in lone) for each in self.options]
        self.counts = tuple(0 if index in lone else count for index, count in enumerate(self.counts))

    def _may_remain(self) -> NDArray[np.bool_] | None:
        rules = self.rules
        if rules.num_stages is None and not rules.least:
            return None
        left = np.indices([count + 1 for count in self.counts])
        allowed = np.ones(left.shape[1:], dtype=bool)
        for index, count in enumerate(self.counts):
            allowed &= left[index] <= count - self.least(index)
        if rules.num_stages is not None:
            allowed &= sum(self.counts) - left.sum(axis=0) == rules.num_stages - self.num_lone
        return allowed

    def of_one_device(self) -> StageLoads:
        """Returns the same with the options of one replica on one device alone."""
        other = copy(self)
        other.options = [each for each in self.options if each.tensor_parallel == each.replicas == 1]
        return other

    def of(self, quantity: Quantity, *, cap: float = math.inf) -> QuantityLoads:
        """Returns one quantity as loads; "fill" leaves out stages whose drain is larger than `cap`."""
        return QuantityLoads(stages=self, quantity=quantity, cap=cap)

    def ends(self, start: int) -> IntArray:
        """Returns where a stage that begins at `start` may end."""
        return self._stages(start).ends

    def seconds(self, start: int, ends: IntArray, quantity: Quantity, cap: float) -> list[FloatArray]:
        """Returns for each option the seconds of stages, [ends, depth]; infinite where that cannot be."""
        stages = self._stages(start)
        rows = np.searchsorted(stages.ends, ends)
        found: list[FloatArray] = []
        for option in self.options:
            replicas = option.replicas * self.unit
            once = stages.once[option.device_class, option.tensor_parallel]
            seconds, sync = once.seconds(option.replicas)[rows], once.sync(replicas)[rows, None]
            rounds = self.rules.micro_batches / replicas
            # One round has nothing to drain, but what cannot be still cannot be: not 0 times infinity.
            drain = (rounds - 1) * seconds + sync if rounds > 1 else np.where(np.isinf(seconds), math.inf, sync)
            if quantity == "rate":
                found.append(seconds / replicas + sync / self.rules.micro_batches)
            elif quantity == "drain":
                found.append(drain)
            else:
                found.append(np.where(drain <= cap, seconds, math.inf))
        return found

    def remat(self, step: Step) -> dict[int, Choice]:
        """Returns how each node of a stage runs."""
        option = self.options[step.option]
        degree = self.degrees[option.device_class, option.tensor_parallel]
        in_flight = self.in_flight(step.depth, option.replicas)
        inside = self._members[step.end] & ~self._members[step.start]
        nodes = [node for node, group in enumerate(degree.group_of) if inside[group]]
        chosen = {node: degree.fastest[node] for node in nodes}
        memory = sum(degree.choices[node][at].memory(in_flight) for node, at in chosen.items())
        missing = memory + degree.working[inside].max() - degree.kind.memory_bytes
        if missing > 0:
            flight = self.flights.index(in_flight)
            chosen |= degree.steps_for(self.flights).chosen(flight, set(nodes), missing)
        return {node: degree.choices[node][at] for node, at in chosen.items()}

    def _stages(self, start: int) -> _Stages:
        if start not in self._cache:
            ends = self.lattice.within(start, np.arange(start + 1, self.num_prefixes))
            inside = self._members[ends] & ~self._members[start]
            moved = self._transfers.between(start, ends)
            once = {key: _Once(self, each, start, ends, inside, moved) for key, each in self.degrees.items()}
            if len(self._cache) * self.num_prefixes * self._members.shape[1] > _MAX_CACHE:
                self._cache.clear()
            self._cache[start] = _Stages(ends=ends, once=once)
        return self._cache[start]

    def flight_of(self, replicas: int) -> IntArray:
        """[depth] which of `flights` it is."""
        return self._flight_of[replicas]

    def in_flight(self, depth: int, replicas: int) -> int:
        """Returns micro-batches in each replica, for replicas and depth in units."""
        if self.num_depths == 1:
            return 1
        rounds = max(self.rules.micro_batches // (replicas * self.unit), 1)
        return min(max(math.ceil(depth / replicas), 1), rounds, self.rules.most_in_flight or rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantityLoads:
    """The loads of one quantity of stages, as `best_chain` takes them."""

    stages: StageLoads
    quantity: Quantity
    cap: float = math.inf

    @property
    def num_prefixes(self) -> int:
        return self.stages.num_prefixes

    @property
    def options(self) -> list[StageOption]:
        return self.stages.options

    @property
    def num_depths(self) -> int:
        return self.stages.num_depths

    def ends(self, start: int) -> IntArray:
        return self.stages.ends(start)

    def loads(self, start: int, ends: IntArray) -> list[FloatArray]:
        return self.stages.seconds(start, ends, self.quantity, self.cap)

    def of_step(self, step: Step) -> float:
        """Returns the quantity of one stage."""
        return float(self.loads(step.start, np.array([step.end]))[step.option][0, step.depth])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stages:
    """The stages from one start."""

    ends: IntArray
    once: dict[tuple[int, int], _Once]


class _Once:
    """Seconds of one micro-batch in the stages from one start, at one degree on one class."""

    def __init__(
        self,
        loads: StageLoads,
        degree: Degree,
        start: int,
        ends: IntArray,
        inside: NDArray[np.bool_],
        moved: FloatArray,
    ) -> None:
        self._loads, self._degree, self._start, self._ends = loads, degree, start, ends
        kind = degree.kind
        sizes = moved[:, 0].copy()
        for group, neighbour, size in degree.border:
            sizes += loads.rules.passes * size * (inside[:, group] & ~inside[:, neighbour])
        transfers = sizes / loads.cluster.link(kind, is_near=loads.is_near) + moved[:, 1] + kind.latency_s * moved[:, 2]
        self._fixed = degree.time_s[ends] - degree.time_s[start] + transfers
        self._fixed[degree.refused[ends] > degree.refused[start]] = math.inf
        if degree.only_with is not None:
            self._fixed[~inside[:, degree.only_with]] = math.inf
        self._saved = degree.saved[ends] - degree.saved[start]
        self._memory = degree.memory[ends] - degree.memory[start] + np.where(inside, degree.working, 0.0).max(axis=1)
        self._parameters = degree.parameters[ends] - degree.parameters[start]
        self._by_flight: FloatArray | None = None  # [flight, end]

    def seconds(self, replicas: int) -> FloatArray:
        """[end, depth]."""
        if self._by_flight is None:
            self._by_flight = self._with_remat()
        return self._by_flight[self._loads.flight_of(replicas)].T

    def sync(self, replicas: int) -> FloatArray:
        """[end]."""
        kind, degree = self._degree.kind, self._degree.degree
        share = self._loads.rules.sync_passes * (replicas - 1) / replicas
        return share * self._parameters / kind.bandwidth(replicas * degree)

    def _with_remat(self) -> FloatArray:
        flights = self._loads.flights
        total = np.repeat(self._fixed[None, :], len(flights), axis=0)
        limit = self._degree.kind.memory_bytes
        if math.isfinite(limit):
            missing = self._memory[None, :] + np.array(flights)[:, None] * self._saved[None, :] - limit
            if (missing > 0).any():
                steps = self._degree.steps_for(flights)
                total += steps.extra(self._start, self._ends, missing, self._fixed, relaxed=self._loads.relaxed)
        return total


def _transfers(graph: CostedGraph, group_of: Sequence[int], lattice: Lattice, rules: Rules) -> Crossings:
    """Returns what crosses borders for each micro-batch: bytes, seconds, messages; forward, and gradients back."""
    index_of = {node.name: index for index, node in enumerate(graph.nodes)}
    pins: dict[tuple[str, str], set[int]] = {}
    costs: dict[tuple[str, str], tuple[float, float, float]] = {}
    for edge in graph.edges:
        key = (edge.source, edge.value)
        pins.setdefault(key, {group_of[index_of[edge.source]]}).add(group_of[index_of[edge.target]])
        times = rules.times_moved(edge)
        costs.setdefault(key, (times * edge.size_bytes, times * edge.time_s, times))
    keys = [key for key in pins if len(pins[key]) > 1]
    return Crossings(
        lattice, [sorted(pins[key]) for key in keys], np.array([costs[key] for key in keys]).reshape(-1, 3)
    )
