"""Nodes that cannot be separated, their order in a pipeline, and the seconds of a node on a device.

A group holds the nodes that share a `together` word and, in a pipeline, whatever lies on a circle through such nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from farspan.cluster import DeviceClass
from farspan.planner.cost_model.costed_graph import CostedGraph, CostedNode, Seconds

__all__ = ["FloatArray", "colocation_groups", "group_nodes", "seconds_on", "strongly_connected"]

FloatArray = NDArray[np.float64]


def seconds_on(node: CostedNode, device_class: DeviceClass) -> float:
    """Forward and backward of a node on a device of that class; infinite where it may not run."""
    if node.devices is not None and not set(device_class.words) & set(node.devices):
        return math.inf
    return sum(_on(seconds, device_class) for seconds in (node.forward_s, node.backward_s))


def _on(seconds: Seconds, device_class: DeviceClass) -> float:
    if not isinstance(seconds, Mapping):
        return seconds / device_class.speed
    for key in device_class.words:
        if key in seconds:
            return seconds[key]
    return math.inf


def group_nodes(graph: CostedGraph) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    """Returns for each node its group, and which group must not come after which.

    Groups are numbered in the order of their first node. Only forward nodes have an order; groups of backward nodes
    alone are ordered by the backward edges, turned round.
    """
    first = colocation_groups(graph)
    num_words = max(first) + 1
    index_of = {node.name: index for index, node in enumerate(graph.nodes)}
    has_forward = [False] * num_words
    for node, word in zip(graph.nodes, first, strict=True):
        has_forward[word] |= not node.is_backward
    pairs: set[tuple[int, int]] = set()
    for edge in graph.edges:
        source, target = index_of[edge.source], index_of[edge.target]
        a, b = first[source], first[target]
        num_backward = graph.nodes[source].is_backward + graph.nodes[target].is_backward
        if num_backward == 0:
            pairs.add((a, b))
        elif num_backward == 2 and not (has_forward[a] and has_forward[b]):
            pairs.add((b, a))
    component = strongly_connected(num_words, pairs)
    numbers: dict[int, int] = {}
    group_of = [numbers.setdefault(component[word], len(numbers)) for word in first]
    of_word = dict(zip(first, group_of, strict=True))
    return group_of, tuple(sorted({(of_word[a], of_word[b]) for a, b in pairs if of_word[a] != of_word[b]}))


def colocation_groups(graph: CostedGraph) -> list[int]:
    """Returns for each node the number of its `together` word; a node without one has a number of its own."""
    numbers: dict[object, int] = {}
    return [
        numbers.setdefault(index if node.together is None else (node.together,), len(numbers))
        for index, node in enumerate(graph.nodes)
    ]


def strongly_connected(count: int, pairs: set[tuple[int, int]]) -> list[int]:
    """Returns the strongly connected component of each of `count` things (Tarjan, without recursion)."""
    targets: list[list[int]] = [[] for _ in range(count)]
    for a, b in pairs:
        targets[a].append(b)
    number, low, component = [-1] * count, [0] * count, [-1] * count
    stack: list[int] = []
    counter = 0
    for root in range(count):
        if number[root] >= 0:
            continue
        work = [(root, 0)]
        while work:
            at, edge = work.pop()
            if edge == 0:
                number[at] = low[at] = counter
                counter += 1
                stack.append(at)
            elif component[targets[at][edge - 1]] < 0:
                low[at] = min(low[at], low[targets[at][edge - 1]])
            descend = False
            while edge < len(targets[at]):
                target = targets[at][edge]
                edge += 1
                if number[target] < 0:
                    work += [(at, edge), (target, 0)]
                    descend = True
                    break
                if component[target] < 0:
                    low[at] = min(low[at], number[target])
            if not descend and low[at] == number[at]:
                while component[at] < 0:
                    component[stack.pop()] = at
    return component
