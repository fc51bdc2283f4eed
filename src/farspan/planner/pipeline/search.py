"""Pipelines: stages of replicas, tensor-parallel degrees and remat, on devices of several classes.

    units of    classes in one product, or      objective
    devices     in an order, one by one
    1, 2, 4 ..  x  ab | a>b | b>a           x   slowest stage, or the time of a step (a sweep over its drain)

Each is searched by dynamic programming; what is exact and what is not shows in the bound.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from farspan.cluster import Cluster
from farspan.errors import PlanError
from farspan.planner.cost_model.bounds import best_weights
from farspan.planner.cost_model.colocation import group_nodes
from farspan.planner.cost_model.costed_graph import CostedGraph
from farspan.planner.partition_dp.chain import Chain, Step, best_chain
from farspan.planner.partition_dp.cuts import good_prefixes
from farspan.planner.partition_dp.lattice import make_lattice
from farspan.planner.partition_dp.stages import Quantity, Rules, StageLoads
from farspan.planner.pipeline.pairs import by_pairs
from farspan.planner.pipeline.stage import PipelineStage
from farspan.units import count_of

__all__ = ["Objective", "Pipeline", "PipelineStage", "plan_pipeline", "stage_of"]

Objective = Literal["bottleneck", "step-time"]

_MAX_WORK = 1.5e9
"""Elementary steps of one dynamic programme."""
_ALL_DEPTHS, _SOME_DEPTHS = 1_000_000, 32
"""How many replicas, in units and in all stages together, are told apart."""
_LITTLE_WORK = 1e8
_NUM_SWEPT = 3
_SWEEP, _SHORT_SWEEP = 24, 5
_FIRST_GROWTH = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The result of `plan_pipeline`: `value` is the objective in seconds, and no pipeline has one below `bound`. `work`
    counts elementary steps of its search. One that is given and not searched for has its stages only.
    """

    objective: Objective = "step-time"
    stages: tuple[PipelineStage, ...]
    value: float = 0.0
    bound: float = 0.0
    search_s: float = 0.0
    work: float = 0.0

    @property
    def gap(self) -> float:
        return 1.0 - self.bound / self.value if self.value else 0.0


def plan_pipeline(
    graph: CostedGraph, cluster: Cluster, *, rules: Rules | None = None, objective: Objective = "step-time"
) -> Pipeline:
    """Returns the best pipeline found for a graph with costs on a cluster.

    Args:
        graph: What to run. The groups of it that must stay together, and its order, make the possible cuts.
        cluster: Where.
        rules: What a step is.
        objective: "step-time": seconds of a step; "bottleneck": seconds for each micro-batch of the slowest stage.

    Raises:
        PlanError: Nothing fits.
    """
    began = time.monotonic()
    rules = rules or Rules()
    search = _Search(graph, cluster, rules, objective, is_near=cluster.has_near_links)
    found = [search.stages()]
    if cluster.num_hosts > 1:
        found += _on_few_hosts(graph, cluster, rules, objective)
        found = [by_pairs(graph, cluster, rules, each) for each in found]
    stages = min(found, key=lambda each: _value(objective, each))
    value = _value(objective, stages)
    return Pipeline(
        objective=objective,
        stages=stages,
        value=value,
        bound=search.bound(value),
        search_s=time.monotonic() - began,
        work=search.work,
    )


def _on_few_hosts(
    graph: CostedGraph, cluster: Cluster, rules: Rules, objective: Objective
) -> Iterator[tuple[PipelineStage, ...]]:
    """Yields pipelines found as if all links were those between hosts; and on one host alone."""
    if cluster.has_near_links:
        yield _Search(graph, cluster, rules, objective).stages()
    for each in cluster.classes:
        if each.devices_per_host > 1 and not each.part_of and not rules.least:
            alone = Cluster(classes=(replace(each, num_hosts=1),))
            with contextlib.suppress(PlanError):  # it does not fit there
                yield _Search(graph, alone, rules, objective).stages()


def _value(objective: Objective, stages: Sequence[PipelineStage]) -> float:
    if objective == "bottleneck":
        return max(stage.rate_s for stage in stages)
    return sum(stage.once_s for stage in stages) + max(stage.drain_s for stage in stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    value: float
    chain: Chain
    phases: list[StageLoads]


class _Search:
    def __init__(
        self, graph: CostedGraph, cluster: Cluster, rules: Rules, objective: Objective, *, is_near: bool = False
    ) -> None:
        self.graph, self.cluster, self.rules, self.objective = graph, cluster, rules, objective
        self.is_near = is_near
        self.group_of, before = group_nodes(graph)
        num_groups = max(self.group_of) + 1
        prefixes, self.is_complete = good_prefixes(graph, self.group_of, before)
        self.lattice = make_lattice(num_groups, prefixes, is_complete=self.is_complete)
        self.is_exact = False
        self.work = 0.0

    def stages(self) -> tuple[PipelineStage, ...]:
        """Returns the best that are found.

        Raises:
            PlanError: Nothing fits.
        """
        loads, chain = self._run()
        return tuple(stage_of(self.graph, each, step) for each, step in zip(loads, chain.steps, strict=True))

    def _run(self) -> tuple[list[StageLoads], Chain]:
        """Yields for each step of the best chain the loads it is of, and the chain."""
        tried: list[_Found] = []
        # The largest units first: they take little time, and what they find cuts the others short.
        for unit in reversed(self._units()):
            tried = self._try(self._phases(unit), tried)
        if not tried and self.rules.num_stages is not None:
            tried = self._try(self._phases(1, first="memory_bytes"), tried)
        if tried:
            best = min(tried, key=lambda each: each.value).phases
            for order in self._other_orders(best):
                tried = self._try(order, tried)
        if not tried:
            raise self._nothing_fits()
        tried.sort(key=lambda each: each.value)
        if self.objective == "step-time":
            for each in tried[: _NUM_SWEPT if self._work(tried[0].phases) <= _LITTLE_WORK else 1]:
                value, chain, _ = self._sweep(each.phases, tried[0].value)
                if chain is not None:
                    tried.append(_Found(value=value, chain=chain, phases=each.phases))
        found = min(tried, key=lambda each: each.value)
        return [found.phases[step.phase] for step in found.chain.steps], found.chain

    def _try(self, phases: list[StageLoads], tried: Sequence[_Found]) -> list[_Found]:
        """Returns what was tried, and the chain with the smallest rate, or drain, if it is worth it."""
        if not phases:
            return [*tried]
        upper = min((each.value for each in tried), default=math.inf) * (1 + 1e-9)
        chain = self._chain(phases, "rate" if self.objective == "bottleneck" else "drain", upper=upper)
        if chain is None:
            return [*tried]
        value = chain.value
        if self.objective == "step-time":
            value += sum(phases[step.phase].of("fill").of_step(step) for step in chain.steps)
        return [*tried, _Found(value=value, chain=chain, phases=phases)]

    def bound(self, value: float) -> float:
        """Below what no pipeline can be, given one of that value."""
        general = self._general_bound()
        if not self.is_exact:
            return general
        loads = self._loads(1, _ALL_DEPTHS, relaxed=True)
        if self.objective == "bottleneck":
            chain = self._chain([loads], "rate", upper=value * (1 + 1e-9))
            return max(general, chain.value * (1 - 1e-9) if chain else 0.0)
        return max(general, self._sweep([loads], value)[2] * (1 - 1e-9))

    def _loads(self, unit: int, max_depth: int, *, relaxed: bool = False) -> StageLoads:
        return StageLoads(
            self.graph,
            self.cluster,
            self.group_of,
            self.lattice,
            self.rules,
            unit=unit,
            max_depth=max_depth,
            relaxed=relaxed,
            is_near=self.is_near,
        )

    def _units(self) -> list[int]:
        most = max(each.num_devices for each in self.cluster.classes)
        most = min(most, self.rules.max_replicas or most)
        return [2**power for power in range(most.bit_length()) if self.rules.micro_batches % 2**power == 0]

    def _phases(self, unit: int, *, first: Literal["speed", "memory_bytes"] = "speed") -> list[StageLoads]:
        """Returns all classes in one phase, or one after the other; empty if both are too much work.

        Where not all devices are to have a stage, and classes come one after the other, those with the most of `first`
        have one.
        """
        for max_depth in (_ALL_DEPTHS, _SOME_DEPTHS):
            loads = self._loads(unit, max_depth)
            if loads.options and self._work([loads]) <= _MAX_WORK:
                self.is_exact |= unit == 1 and self.is_complete and max_depth == _ALL_DEPTHS
                return [loads]
            # By memory: early stages keep more micro-batches.
            classes = sorted(
                (index for index, count in enumerate(loads.counts) if count),
                key=lambda index: -self.cluster.classes[index].memory_bytes,
            )
            phases = [loads.only(index) for index in classes]
            if self.rules.num_stages is not None:
                phases = self._used_up(loads, classes, first)
            if phases and self._work(phases) <= _MAX_WORK:
                return phases
        return []

    def _used_up(self, loads: StageLoads, classes: Sequence[int], first: str) -> list[StageLoads]:
        """Phases of as many devices together as there are to be stages: those that must have one, then the best."""
        assert self.rules.num_stages is not None
        taken = {index: loads.least(index) for index in classes}
        left = self.rules.num_stages - loads.num_lone - sum(taken.values())
        for index in sorted(classes, key=lambda index: -getattr(self.cluster.classes[index], first)):
            more = max(0, min(left, loads.counts[index] - taken[index]))
            taken[index] += more
            left -= more
        return [loads.only(index, exactly=taken[index]) for index in classes if taken[index]] if not left else []

    def _other_orders(self, phases: list[StageLoads]) -> list[list[StageLoads]]:
        """Returns orders of the classes in phases: the fast ones first, or last, or those of little memory."""
        kinds = {id(each): next(iter(each.degrees.values())).kind for each in phases}
        orders = [
            sorted(phases, key=lambda each: sign * getattr(kinds[id(each)], what))
            for what in ("speed", "memory_bytes")
            for sign in (1, -1)
        ]
        seen, others = [list(map(id, phases))], list[list[StageLoads]]()
        for order in orders:
            if list(map(id, order)) not in seen:
                seen.append(list(map(id, order)))
                others.append(order)
        return others

    def _work(self, phases: Sequence[StageLoads]) -> float:
        states = (math.prod(count + 1 for count in each.counts) * each.num_depths for each in phases)
        pairs = len(self.lattice.prefixes) ** 2 / 2
        return pairs * sum(len(each.options) * count for each, count in zip(phases, states, strict=True))

    def _sweep(self, phases: Sequence[StageLoads], known: float) -> tuple[float, Chain | None, float]:
        """Returns the best time of a step if it is better than `known`, its chain, and a lower bound.

        With cap(i) rising, S(i) the smallest sum of fills among chains whose drains are at most cap(i): a chain whose
        largest drain lies between cap(i) and cap(i + 1) takes at least cap(i) + S(i + 1).
        """
        best, best_chain_, bound = known, None, math.inf
        least = self._chain(phases, "drain", upper=known)
        free = self._chain(phases, "fill", cap=known)
        if least is None or free is None:
            return best, None, known
        cap = previous = least.value
        sweep = _SWEEP if self._work(phases) <= _LITTLE_WORK else _SHORT_SWEEP
        for number in range(sweep):
            chain = self._chain(phases, "fill", cap=cap * (1 + 1e-9))
            assert chain is not None
            value = chain.value + max(phases[step.phase].of("drain").of_step(step) for step in chain.steps)
            if value < best:
                best, best_chain_ = value, chain
            bound = min(bound, previous + chain.value)
            previous = cap
            if cap + free.value >= best:
                break
            cap = max(cap * _FIRST_GROWTH, cap + (best - free.value - cap) / (sweep - number))
        return best, best_chain_, min(bound, previous + free.value, best)

    def _chain(
        self, phases: Sequence[StageLoads], quantity: Quantity, *, cap: float = math.inf, upper: float = math.inf
    ) -> Chain | None:
        self.work += self._work(phases)
        return best_chain(
            [(each.of(quantity, cap=cap), each.counts) for each in phases],
            upper=upper,
            total=quantity == "fill",
            may_remain=[each.may_remain for each in phases],
        )

    def _general_bound(self) -> float:
        """Returns the bound of all work on all devices in fractions, each node at its cheapest; and one micro-batch at
        its fastest."""
        loads = self._loads(1, 1)
        counts = [each.num_devices for each in self.cluster.classes]
        work = np.full((len(self.graph.nodes), len(counts)), math.inf)
        fastest = np.full(len(self.graph.nodes), math.inf)
        for (index, degree), each in loads.degrees.items():
            for node, choices in enumerate(each.choices):
                if choices:
                    least = min(choice.time_s for choice in choices)
                    work[node, index] = min(work[node, index], degree * least)
                    fastest[node] = min(fastest[node], least)
        rate = float(best_weights(work, counts)[1].sum())
        if self.objective == "bottleneck":
            return rate * (1 - 1e-9)
        return max(self.rules.micro_batches * rate, float(fastest.sum())) * (1 - 1e-9)

    def _nothing_fits(self) -> PlanError:
        from farspan.units import format_bytes

        most = max(each.memory_bytes for each in self.cluster.classes)
        devices = count_of(self.cluster.num_devices, "device")
        return PlanError(
            f"{self.graph.source}: no pipeline fits {devices} of {format_bytes(most)}.",
            why=f"the nodes keep {format_bytes(sum(node.memory_bytes for node in self.graph.nodes))}, and "
            f"{format_bytes(sum(node.saved_bytes for node in self.graph.nodes))} of each micro-batch in flight.",
            hint="more devices, smaller micro-batches, or options with remat for the nodes that keep the most",
        )


def stage_of(graph: CostedGraph, loads: StageLoads, step: Step) -> PipelineStage:
    """Returns the stage that a step of a chain is, by the loads it was found with."""
    option = loads.options[step.option]
    degree = loads.degrees[option.device_class, option.tensor_parallel]
    replicas = option.replicas * loads.unit
    in_flight = loads.in_flight(step.depth, option.replicas)
    chosen = loads.remat(step)
    return PipelineStage(
        device_class=degree.kind.name,
        replicas=replicas,
        tensor_parallel=option.tensor_parallel,
        nodes=tuple(graph.nodes[node].name for node in sorted(chosen)),
        options={graph.nodes[node].name: choice.name for node, choice in sorted(chosen.items()) if choice.name},
        once_s=loads.of("fill").of_step(step),
        rate_s=loads.of("rate").of_step(step),
        drain_s=loads.of("drain").of_step(step),
        memory_bytes=sum(choice.memory(in_flight) for choice in chosen.values())
        + max(float(degree.working[degree.group_of[node]]) for node in chosen),
        in_flight=in_flight,
    )
