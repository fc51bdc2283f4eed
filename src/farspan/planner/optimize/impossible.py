"""Explains why there is no plan, and what would help."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from farspan.cluster import Cluster
from farspan.errors import PlanError
from farspan.plan.hints import Hints
from farspan.planner.constraints import HintedProblem, hinted_problem
from farspan.planner.cost_model import CostedGraph, CostedNode
from farspan.planner.cost_model.colocation import group_nodes
from farspan.planner.optimize.fitting import fitting
from farspan.units import count_of, format_bytes, format_seconds

__all__ = ["in_the_way", "nothing_fits"]

_MORE = (2, 4, 8, 16)
_MOST_SHOWN = 4
_STEP, _FAR, _NEAR, _ROUNDED_UP = 16.0, 2.0**50, 1.03, 1.06
"""Of the search for the least memory: factors that are tried, up to which one, how near it is found, and what rounding
takes at most."""
_OF_MICRO_BATCHES = (
    "saved_bytes",
    "working_bytes",
    "forward_working_bytes",
    "split_working_bytes",
    "released_bytes",
    "split_released_bytes",
    "left_bytes",
)
"""Costs of a node that are proportional to the rows of a micro-batch, besides shared_bytes."""


def nothing_fits(
    graph: CostedGraph, cluster: Cluster, num_micro_batches: int, hints: Hints, *, tried_s: float | None = None
) -> PlanError:
    """Returns the error: which hint is in the way, or the smallest change that would help.

    Args:
        graph: What does not fit.
        cluster: Where.
        num_micro_batches: Of a step.
        hints: The user's.
        tried_s: How long a plan was looked for, where this is no proof that there is none.
    """

    def fits(graph: CostedGraph, cluster: Cluster, num_micro_batches: int, hints: Hints = hints) -> bool:
        problem = hinted_problem(graph, cluster, hints)
        return fitting(problem, problem.cluster, num_micro_batches, is_question=True).best is not None

    if not hints.are_stages_given and fits(graph, cluster, num_micro_batches, replace(hints, stages=None)):
        return _fewer_stages(hinted_problem(graph, cluster, hints))
    if hints and fits(graph, cluster, num_micro_batches, Hints()):
        return in_the_way(hints, lambda others: fits(graph, cluster, num_micro_batches, others))
    helps: list[str] = []
    for times in _MORE:
        if fits(_with_smaller_batches(graph, times), cluster, times * num_micro_batches):
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
    kept, again = (n.saved_bytes for n in graph.nodes), (_least_saved(n) for n in graph.nodes)
    heaviest = max(graph.nodes, key=lambda node: node.memory_bytes)
    most = max(each.memory_bytes for each in cluster.classes)
    where = f"{count_of(cluster.num_devices, 'device')} of {format_bytes(most)}"
    searched = "" if tried_s is None else f"\nNot all plans could be tried in {format_seconds(tried_s)}: one may fit."
    return PlanError(
        f"no plan fits {where}." if tried_s is None else f"no plan was found that fits {where}.",
        why=f"parameters, gradients and optimizer state are {format_bytes(sum(n.memory_bytes for n in graph.nodes))} "
        f"(most in '{heaviest.name}': {format_bytes(heaviest.memory_bytes)}),\nand a micro-batch keeps "
        f"{format_bytes(sum(kept))}, all of it computed again {format_bytes(sum(again))}.{searched}",
        hint=", or\n".join(helps) or "a smaller model, or smaller batches on far more devices",
    )


def _fewer_stages(problem: HintedProblem) -> PlanError:
    """Returns the error for a stage on each rank, which nobody has asked for, where a plan has fewer."""
    num_ranks, num_groups = problem.cluster.num_devices, max(group_nodes(problem.searched)[0]) + 1
    parts = count_of(num_groups, "part")
    together = f"the search keeps units together that use each other's results, or share tensors: it has {parts}."
    return PlanError(
        f"no plan was found that has a stage on each of {count_of(num_ranks, 'rank')}.",
        why=together if num_groups < num_ranks else "there is one with fewer stages.",
        hint=f"farspan run -n {num_groups}" if num_groups < num_ranks else "fewer ranks",
    )


def _least_saved(node: CostedNode) -> float:
    """Returns what it keeps of a micro-batch in the way that keeps the least."""
    return min([node.saved_bytes, *(option.saved_bytes for option in node.options)])


def _with_smaller_batches(graph: CostedGraph, times: int) -> CostedGraph:
    """Returns the graph with so many times fewer rows in a micro-batch: all bytes that these take are less."""
    nodes = tuple(
        replace(
            node,
            **{name: getattr(node, name) / times for name in _OF_MICRO_BATCHES},
            shared_bytes={word: size / times for word, size in node.shared_bytes.items()},
            options=tuple(replace(option, saved_bytes=option.saved_bytes / times) for option in node.options),
        )
        for node in graph.nodes
    )
    edges = tuple(
        edge
        if edge.is_parameter
        else replace(
            edge,
            size_bytes=edge.size_bytes / times,
            gradient_bytes=None if edge.gradient_bytes is None else edge.gradient_bytes / times,
        )
        for edge in graph.edges
    )
    return replace(graph, nodes=nodes, edges=edges)


def in_the_way(hints: Hints, fits: Callable[[Hints], bool], *, is_estimate: bool = False) -> PlanError:
    """Returns the error for hints that no plan keeps, where there is a plan without hints.

    Args:
        hints: The user's.
        fits: Whether there is a plan with others.
        is_estimate: Whether of memory only parameters and their gradients are known.
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
    more = None
    if hints.max_memory is not None and hints.memory_in_words() in blocking:
        more = _least_memory(hints, fits)
    if more is not None:
        if is_estimate:
            least = more.memory_in_words()
            why += f"\nParameters and gradients alone need about {least}, optimizer and activations more."
            helps = f"several times that max_memory, or {helps}"
        else:
            why += f"\nThe least with which there is one is about {more.memory_in_words()}."
            helps = f"{more.memory_in_words()}, or {helps}"
    return PlanError(
        f"no plan keeps the hint {blocking[0]}." if len(said) == 1 else f"no plan keeps all {len(said)} hints.",
        why=why,
        hint=helps,
    )


def _least_memory(hints: Hints, fits: Callable[[Hints], bool]) -> Hints | None:
    """Returns hints with about the least `max_memory` with which there is a plan; None where it is far from the user's.

    Args:
        hints: The user's, with which there is none.
        fits: Whether there is a plan with others.
    """
    low, high = 1.0, _STEP
    while not fits(hints.with_memory(high)):
        low, high = high, high * _STEP
        if high > _FAR:
            return None
    while high > _NEAR * low:
        middle = math.sqrt(low * high)
        if fits(hints.with_memory(middle)):
            high = middle
        else:
            low = middle
    for times in (high, _ROUNDED_UP * high):  # as a text of one decimal it may be less
        found = hints.with_memory(times).with_rounded_memory()
        if fits(found):
            return found
    return None
