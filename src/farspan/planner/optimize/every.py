"""Lists all pipelines that there are, for graphs and clusters so small that they can be counted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from farspan.cluster import Cluster, DeviceClass
from farspan.planner.cost_model import CostedGraph, CostedNode
from farspan.planner.cost_model.colocation import group_nodes, seconds_on
from farspan.planner.partition_dp.lattice import all_prefixes
from farspan.planner.partition_dp.stages import Rules
from farspan.planner.pipeline import Pipeline, PipelineStage

__all__ = ["every_pipeline"]

_MOST_PREFIXES = 64
_MOST_DEVICES = 5


def every_pipeline(graph: CostedGraph, cluster: Cluster, rules: Rules) -> Iterator[Pipeline]:
    """Lists each chain of stages with one device each, in each order of devices, with each way to run each node.

    Args:
        graph: What is run; of one with more than 64 places to cut it there is none.
        cluster: Where; for more than five devices there is none.
        rules: How many stages there may be, and which devices must have one.
    """
    group_of, before = group_nodes(graph)
    prefixes = all_prefixes(max(group_of) + 1, before, limit=_MOST_PREFIXES)
    if prefixes is None or cluster.num_devices > _MOST_DEVICES:
        return
    prefixes.sort(key=lambda prefix: (prefix.bit_count(), prefix))
    nodes = {node.name: node for node in graph.nodes}
    kinds = {each.name: each for each in cluster.classes}
    ways = [[(node.name, way) for way in node.names_of_ways] for node in graph.nodes]
    for count in range(1, min(cluster.num_devices, max(group_of) + 1) + 1):
        if rules.num_stages not in (None, count):
            continue
        orders = [
            order for order in _orders(cluster, count) if all(order.count(n) >= m for n, m in rules.least.items())
        ]
        if not orders:
            continue
        for masks in _chains(prefixes, 0, count):
            rows = [
                tuple(node.name for node, group in zip(graph.nodes, group_of, strict=True) if mask >> group & 1)
                for mask in masks
            ]
            for order in orders:
                for chosen in itertools.product(*ways):
                    way_of = dict(chosen)
                    if not all(
                        _may_fit(nodes, names, way_of, kinds[kind]) for kind, names in zip(order, rows, strict=True)
                    ):
                        continue
                    yield Pipeline(
                        stages=tuple(
                            PipelineStage(
                                device_class=kind,
                                nodes=names,
                                options={name: way_of[name] for name in names if way_of[name]},
                            )
                            for kind, names in zip(order, rows, strict=True)
                        )
                    )


def _chains(prefixes: Sequence[int], start: int, count: int) -> Iterator[list[int]]:
    """Yields all ways to cut what follows a prefix into so many stages: the groups of each, as bits."""
    if count == 1:
        yield [prefixes[-1] & ~start]
        return
    for prefix in prefixes:
        if prefix != start and not start & ~prefix and (prefixes[-1] & ~prefix).bit_count() >= count - 1:
            for later in _chains(prefixes, prefix, count - 1):
                yield [prefix & ~start, *later]


def _orders(cluster: Cluster, count: int) -> Iterator[tuple[str, ...]]:
    """Yields all ways to take so many devices, by their classes."""
    names = [each.name for each in cluster.classes]
    for order in itertools.product(names, repeat=count):
        if all(order.count(each.name) <= each.num_devices for each in cluster.classes):
            yield order


def _may_fit(
    nodes: Mapping[str, CostedNode], names: Sequence[str], way_of: Mapping[str, str], kind: DeviceClass
) -> bool:
    """Returns whether all may run there, and one micro-batch of them has the memory."""
    run = [nodes[name].as_run(way_of[name]) for name in names]
    fits = sum(each.least_bytes for each in run) <= kind.memory_bytes
    return fits and all(seconds_on(each, kind) < math.inf for each in run)
