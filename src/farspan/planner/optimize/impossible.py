"""Explains why there is no plan, and what would help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from farspan.cluster import Cluster
from farspan.errors import PlanError
from farspan.plan.hints import Hints
from farspan.planner.constraints import hinted_problem
from farspan.planner.cost_model import CostedGraph
from farspan.planner.optimize.fitting import fitting
from farspan.units import format_bytes

__all__ = ["in_the_way", "nothing_fits"]

_MORE = (2, 4, 8, 16)
_MOST_SHOWN = 4


def nothing_fits(graph: CostedGraph, cluster: Cluster, num_micro_batches: int, hints: Hints) -> PlanError:
    """Returns the error: which hint is in the way, or the smallest change that would help."""

    def fits(graph: CostedGraph, cluster: Cluster, num_micro_batches: int, hints: Hints = hints) -> bool:
        problem = hinted_problem(graph, cluster, hints)
        return fitting(problem, problem.cluster, num_micro_batches, is_question=True) is not None

    if hints and fits(graph, cluster, num_micro_batches, Hints()):
        return in_the_way(hints, lambda others: fits(graph, cluster, num_micro_batches, others))
    helps: list[str] = []
    for times in _MORE:
        nodes = tuple(
            replace(
                node,
                saved_bytes=node.saved_bytes / times,
                working_bytes=node.working_bytes / times,
                released_bytes=node.released_bytes / times,
                options=tuple(replace(option, saved_bytes=option.saved_bytes / times) for option in node.options),
            )
            for node in graph.nodes
        )
        if fits(replace(graph, nodes=nodes), cluster, times * num_micro_batches):
            helps.append(f"{times * num_micro_batches} micro-batches, each {times} times smaller")
            break
    for times in _MORE:
        more = Cluster(classes=tuple(replace(each, num_hosts=each.num_hosts * times) for each in cluster.classes))
        if fits(graph, more, num_micro_batches):
            helps.append(f"{times * cluster.num_devices} devices")
            break
    for times in _MORE:
        more = Cluster(classes=tuple(replace(each, memory_bytes=each.memory_bytes * times) for each in cluster.classes))
        if fits(graph, more, num_micro_batches):
            most = max(each.memory_bytes for each in more.classes)
            helps.append(f"devices of {format_bytes(most)}")
            break
    heaviest = max(graph.nodes, key=lambda node: node.memory_bytes)
    most = max(each.memory_bytes for each in cluster.classes)
    return PlanError(
        f"no plan fits {cluster.num_devices} devices of {format_bytes(most)}.",
        why=f"parameters, gradients and optimizer state are {format_bytes(sum(n.memory_bytes for n in graph.nodes))} "
        f"(most in '{heaviest.name}': {format_bytes(heaviest.memory_bytes)}),\nand a micro-batch keeps "
        f"{format_bytes(sum(n.saved_bytes for n in graph.nodes))}, all of it computed again "
        f"{format_bytes(sum(min([n.saved_bytes, *(o.saved_bytes for o in n.options)]) for n in graph.nodes))}.",
        hint=", or\n".join(helps) or "a smaller model, or smaller batches on far more devices",
    )


def in_the_way(hints: Hints, fits: Callable[[Hints], bool]) -> PlanError:
    """Returns the error for hints that no plan keeps, where there is a plan without hints.

    Args:
        hints: The user's.
        fits: Whether there is a plan with others.
    """
    said = hints.said()
    blocking = [words for words, others in said.items() if fits(others)]
    if blocking:
        why = f"there is a plan without {', or without '.join(blocking[:_MOST_SHOWN])}."
    else:
        why = f"to leave out one of them does not help: {', '.join(list(said)[:_MOST_SHOWN])}."
    helps = (
        "leave that one out" if len(blocking) == 1 else "leave out one of these" if blocking else "leave out several"
    )
    for times in _MORE if hints.max_memory is not None else ():
        more = hints.with_memory(times)
        if fits(more):
            helps = f"{more.memory_in_words()}, or {helps}"
            break
    return PlanError(
        f"no plan keeps the hint {blocking[0]}." if len(said) == 1 else f"no plan keeps all {len(said)} hints.",
        why=why,
        hint=helps,
    )
