"""Max-load as dnn-partitioning defines it, and what a contiguous placement is: independent definitions, for tests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

from farspan.cluster import Cluster
from farspan.planner.cost_model import CostedGraph

__all__ = ["is_contiguous", "max_load"]


def max_load(
    graph: CostedGraph, cluster: Cluster, device_of: Sequence[int], without_transfers: Collection[str] = ()
) -> float:
    """The definition of dnn-partitioning, node by node; infinite where the placement is not allowed."""
    kinds = [each for each in cluster.classes for _ in range(each.num_devices)]
    where = {node.name: device for node, device in zip(graph.nodes, device_of, strict=True)}
    first: dict[str, int] = {}
    for node, device in zip(graph.nodes, device_of, strict=True):
        if node.devices is not None and kinds[device].kind not in node.devices:
            return math.inf
        if node.together is not None and first.setdefault(node.together, device) != device:
            return math.inf
    worst = 0.0
    for device, kind in enumerate(kinds):
        mine = [node for node in graph.nodes if where[node.name] == device]
        if sum(node.memory_bytes for node in mine) > kind.memory_bytes:
            return math.inf
        load = sum(float(node.forward_s) for node in mine) / kind.speed  # type: ignore[arg-type]
        if kind.name not in without_transfers:
            crossing = {
                (edge.source, edge.time_s)
                for edge in graph.edges
                if (where[edge.source] == device) != (where[edge.target] == device)
            }
            load += sum(seconds for _, seconds in crossing)
        worst = max(worst, load)
    return worst


def is_contiguous(graph: CostedGraph, device_of: Sequence[int]) -> bool:
    """Whether some order of the devices has no forward edge that goes back."""
    where = {node.name: device for node, device in zip(graph.nodes, device_of, strict=True)}
    backward = {node.name for node in graph.nodes if node.is_backward}
    pairs = {
        (where[edge.source], where[edge.target]) for edge in graph.edges if not backward & {edge.source, edge.target}
    }
    used = sorted(set(device_of))
    return any(all(order.index(a) <= order.index(b) for a, b in pairs) for order in itertools.permutations(used))
