"""The best plan that distribute can run, those next to it and why they lost, and what would help where nothing fits."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from farspan.cluster import Cluster
from farspan.errors import PlanError
from farspan.planner.answer.bound import lower_bound
from farspan.planner.answer.forecast import Forecast, can_run, forecast
from farspan.planner.answer.moves import improved
from farspan.planner.costed import CostedGraph
from farspan.planner.pipeline import Pipeline, plan_pipeline
from farspan.planner.search.stages import Rules
from farspan.units import format_seconds

__all__ = ["Answer", "Loser", "best_plan"]

_MOST_SINGLE_DEVICES = 8
_OTHERS_S = 10.0
"""How long to look at other plans than the best."""
_MOVES_S = 3.0
"""How long to move borders."""
_MORE = (2, 4, 8, 16)
_MOST_SEARCHES = 4
"""With less memory each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loser:
    """A plan that was not taken.

    Attributes:
        what: In words.
        step_s: Its step; infinite where it does not fit.
        why: Why another is better.
        pipeline: The plan; None where there is none.
    """

    what: str
    step_s: float
    why: str
    pipeline: Pipeline | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a search for the user's cluster has found.

    Attributes:
        best: The plan.
        bound: No plan that distribute can run takes less, transfers and memory aside.
        losers: The others, the best first.
        search_s: Seconds of all searches together.
    """

    best: Forecast
    bound: float
    losers: tuple[Loser, ...]
    search_s: float

    @property
    def gap(self) -> float:
        """How much better, as a share of its step, the best plan can be at most."""
        return max(0.0, 1.0 - self.bound / self.best.step_s) if self.best.step_s else 0.0


def best_plan(graph: CostedGraph, cluster: Cluster, num_micro_batches: int) -> Answer:
    """Find the plan for a step.

    Args:
        graph: Its nodes are modules or parameters of the model.
        cluster: What there is to run it on; not all of it has to be used.
        num_micro_batches: Of a step.

    Raises:
        PlanError: Nothing fits; says what would.
    """
    began = time.monotonic()
    whole = _fitting(graph, cluster, cluster, num_micro_batches)
    if whole is None:
        raise _nothing_fits(graph, cluster, num_micro_batches)
    losers: list[Loser] = []
    found: dict[tuple[tuple[str, ...], ...], Forecast] = {}
    for count in _counts(len(whole.stages)):
        if time.monotonic() - began > _OTHERS_S and count != len(whole.stages):
            continue
        is_whole = count == len(whole.stages)
        fewer = cluster if is_whole else _only(cluster, whole.pipeline, count)
        each = whole if is_whole else _fitting(graph, fewer, cluster, num_micro_batches)
        if each is None:
            losers.append(Loser(what=_devices(count), step_s=float("inf"), why="it does not fit into their memory"))
        else:
            found.setdefault(tuple(stage.nodes for stage in each.stages), each)
    # The search counts transfers as if nothing ran beside them: what is played decides between its best plans.
    first = min(found.values(), key=lambda each: (each.step_s, len(each.stages)))
    best = improved(first, graph, cluster, seconds=_MOVES_S)
    losers += [_loser(each, best) for each in found.values() if each is not first]
    if cluster.num_devices > 1 and time.monotonic() - began <= _OTHERS_S:
        wide = _found(graph, cluster, Rules(micro_batches=num_micro_batches))
        if wide is not None and not can_run(wide):
            losers.append(
                Loser(
                    what=" + ".join(
                        f"{stage.replicas} x {stage.tensor_parallel} {stage.device_class}" for stage in wide.stages
                    ),
                    step_s=wide.value,
                    why="distribute cannot run several replicas of a stage yet",
                    pipeline=wide,
                )
            )
    return Answer(
        best=best,
        bound=min(lower_bound(graph, cluster, num_micro_batches), best.step_s),
        losers=tuple(sorted(losers, key=lambda each: each.step_s)),
        search_s=time.monotonic() - began,
    )


def _fitting(graph: CostedGraph, searched: Cluster, cluster: Cluster, num_micro_batches: int) -> Forecast | None:
    """The best plan for the devices in `searched`; None where none fits.

    The search counts neither what a piece needs while it runs nor what is sent: where that is too much, it is told of
    so much less memory.
    """
    rules = Rules(micro_batches=num_micro_batches, max_replicas=1)
    less = 0.0
    for _ in range(_MOST_SEARCHES):
        classes = tuple(replace(each, memory_bytes=max(0.0, each.memory_bytes - less)) for each in searched.classes)
        pipeline = _found(graph, Cluster(classes=classes), rules)
        if pipeline is None:
            return None
        found = forecast(graph, cluster, pipeline, num_micro_batches)
        if found.fits:
            return found
        less += max(stage.memory_bytes - stage.limit_bytes for stage in found.stages)
    return None


def _found(graph: CostedGraph, cluster: Cluster, rules: Rules) -> Pipeline | None:
    try:
        return plan_pipeline(graph, cluster, rules=rules)
    except PlanError:
        return None


def _counts(most: int) -> list[int]:
    """Numbers of devices to compare: all up to a few, then powers of two."""
    few = range(1, min(most, _MOST_SINGLE_DEVICES) + 1)
    return sorted({*few, most, *(2**power for power in range(3, most.bit_length()))})


def _only(cluster: Cluster, pipeline: Pipeline, count: int) -> Cluster:
    """At most `count` devices: of each class as many as the best plan has, those of the fastest stages first."""
    names = [stage.device_class for stage in pipeline.stages]
    ranked = sorted(cluster.classes, key=lambda each: -each.speed)
    order = [name for each in ranked for name in names if name == each.name][:count]
    classes = [
        replace(each, num_hosts=1, devices_per_host=order.count(each.name))
        if order.count(each.name) <= each.devices_per_host
        else replace(each, num_hosts=-(-order.count(each.name) // each.devices_per_host))
        for each in cluster.classes
        if each.name in order
    ]
    return Cluster(classes=tuple(classes))


def _devices(count: int) -> str:
    return "one device" if count == 1 else f"{count} devices"


def _loser(each: Forecast, best: Forecast) -> Loser:
    slowest = max(each.stages, key=lambda stage: stage.forward_s + stage.backward_s)
    of_best = max(stage.forward_s + stage.backward_s for stage in best.stages)
    taken = slowest.forward_s + slowest.backward_s
    if taken > of_best * 1.01:
        why = f"{slowest.where} takes {format_seconds(taken)} for each micro-batch, not {format_seconds(of_best)}"
    elif each.bubble > best.bubble:
        why = f"its bubble is {100 * each.bubble:.0f} %, not {100 * best.bubble:.0f} %"
    else:
        why = "its transfers take longer"
    return Loser(what=_devices(len(each.stages)), step_s=each.step_s, why=why, pipeline=each.pipeline)


def _nothing_fits(graph: CostedGraph, cluster: Cluster, num_micro_batches: int) -> PlanError:
    """The error, with the smallest change that would help."""
    from farspan.units import format_bytes

    hints: list[str] = []
    for times in _MORE:
        nodes = tuple(
            replace(
                node,
                saved_bytes=node.saved_bytes / times,
                working_bytes=node.working_bytes / times,
                options=tuple(replace(option, saved_bytes=option.saved_bytes / times) for option in node.options),
            )
            for node in graph.nodes
        )
        if _fitting(replace(graph, nodes=nodes), cluster, cluster, times * num_micro_batches):
            hints.append(f"{times * num_micro_batches} micro-batches, each {times} times smaller")
            break
    for times in _MORE:
        more = Cluster(classes=tuple(replace(each, num_hosts=each.num_hosts * times) for each in cluster.classes))
        if _fitting(graph, more, more, num_micro_batches):
            hints.append(f"{times * cluster.num_devices} devices")
            break
    for times in _MORE:
        more = Cluster(classes=tuple(replace(each, memory_bytes=each.memory_bytes * times) for each in cluster.classes))
        if _fitting(graph, more, more, num_micro_batches):
            most = max(each.memory_bytes for each in more.classes)
            hints.append(f"devices of {format_bytes(most)}")
            break
    heaviest = max(graph.nodes, key=lambda node: node.memory_bytes)
    most = max(each.memory_bytes for each in cluster.classes)
    return PlanError(
        f"no plan fits {cluster.num_devices} devices of {format_bytes(most)}.",
        why=f"parameters, gradients and optimizer state are {format_bytes(sum(n.memory_bytes for n in graph.nodes))} "
        f"(most in '{heaviest.name}': {format_bytes(heaviest.memory_bytes)}),\nand a micro-batch keeps "
        f"{format_bytes(sum(n.saved_bytes for n in graph.nodes))}, all of it computed again "
        f"{format_bytes(sum(min([n.saved_bytes, *(o.saved_bytes for o in n.options)]) for n in graph.nodes))}.",
        hint=", or\n".join(hints) or "a smaller model, or smaller batches on far more devices",
    )
