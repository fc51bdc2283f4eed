"""Lists all pipelines that there are, for graphs and clusters so small that they can be counted.

What cannot fit is left out before it is built: a stage whose nodes exceed every device however they are run, the chains
that cannot end from a prefix, and the ways to run some nodes of a stage that leave too little for its others. So there
is little work between one pipeline and the next, and it is charged to a budget: even a list without any pipeline ends.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from farspan.cluster import Cluster, DeviceClass
from farspan.planner.cost_model import CostedGraph, CostedNode
from farspan.planner.cost_model.colocation import group_nodes, seconds_on
from farspan.planner.partition_dp.lattice import all_prefixes
from farspan.planner.partition_dp.stages import Rules
from farspan.planner.pipeline import Pipeline, PipelineStage

__all__ = ["can_be_listed", "every_pipeline"]

_MOST_PREFIXES = 64
_MOST_DEVICES = 5
_ROUNDING = 1 + 1e-9
_TASKS_PER_STAGE = 1.0
"""About as many tasks are simulated in the time in which the devices of a chain are compared with a stage."""


def can_be_listed(graph: CostedGraph, cluster: Cluster) -> bool:
    """Returns whether the graph has at most 64 places to cut it, and the cluster at most five devices."""
    return cluster.num_devices <= _MOST_DEVICES and _prefixes_of(graph)[1] is not None


def every_pipeline(
    graph: CostedGraph, cluster: Cluster, rules: Rules, charge: Callable[[float], bool], *, emptiest_only: bool = False
) -> Iterator[Pipeline]:
    """Lists each chain of stages with one device each, in each order of devices, with each way to run each node.

    Args:
        graph: What is run; of one that cannot be listed there is none.
        cluster: Where.
        rules: How many stages there may be, and which devices must have one.
        charge: Called with the work that was done, in simulated tasks; the list ends where it returns false.
        emptiest_only: Whether each chain on each order of devices is listed once, with its nodes run in the way that
            keeps the least, instead of in all ways.
    """
    if not can_be_listed(graph, cluster):
        return
    group_of, prefixes = _prefixes_of(graph)
    assert prefixes is not None
    sizes = _Sizes(graph, cluster, group_of)
    for count in range(1, min(cluster.num_devices, max(group_of) + 1) + 1):
        if rules.num_stages not in (None, count):
            continue
        orders = [
            order for order in _orders(cluster, count) if all(order.count(n) >= m for n, m in rules.least.items())
        ]
        if not orders:
            continue
        for masks in _chains(prefixes, count, sizes.fits_somewhere):
            for order in orders:
                if not charge(_TASKS_PER_STAGE * count):
                    return
                if all(kind in sizes.classes_of(mask) for kind, mask in zip(order, masks, strict=True)):
                    yield from _run_in_each_way(sizes, masks, order, emptiest_only)


def _prefixes_of(graph: CostedGraph) -> tuple[list[int], list[int] | None]:
    """Returns the group of each node, and the prefixes in order of size; None where there are too many of these."""
    group_of, before = group_nodes(graph)
    prefixes = all_prefixes(max(group_of) + 1, before, limit=_MOST_PREFIXES)
    return group_of, prefixes and sorted(prefixes, key=lambda prefix: (prefix.bit_count(), prefix))


class _Sizes:
    """How much nodes keep at least on devices of a class, for one micro-batch."""

    def __init__(self, graph: CostedGraph, cluster: Cluster, group_of: Sequence[int]) -> None:
        self.graph, self.group_of = graph, group_of
        self.limits = {each.name: each.memory_bytes for each in cluster.classes}
        self.ways = {
            each.name: [[(way, size) for way, size in _sizes(node, each)] for node in graph.nodes]
            for each in cluster.classes
        }
        """By class, for each node: the ways to run it there, and the bytes of each."""
        self.least = {
            name: [min((size for _, size in ways), default=math.inf) for ways in of_nodes]
            for name, of_nodes in self.ways.items()
        }
        self._classes: dict[int, tuple[str, ...]] = {}

    def classes_of(self, mask: int) -> tuple[str, ...]:
        """Returns the classes of the devices that may hold these groups together."""
        if mask not in self._classes:
            numbers = self.nodes_of(mask)
            self._classes[mask] = tuple(
                name
                for name, least in self.least.items()
                if math.inf not in (own := [least[number] for number in numbers])
                and sum(own) <= self.limits[name] * _ROUNDING
            )
        return self._classes[mask]

    def fits_somewhere(self, mask: int) -> bool:
        """Returns whether any device may hold these groups together."""
        return bool(self.classes_of(mask))

    def nodes_of(self, mask: int) -> list[int]:
        """Returns the nodes of these groups, by their places in the graph."""
        return [number for number, group in enumerate(self.group_of) if mask >> group & 1]


def _sizes(node: CostedNode, kind: DeviceClass) -> Iterator[tuple[str, float]]:
    """Yields the ways to run a node on a device of that class, with what it keeps there at least."""
    for way in node.names_of_ways:
        run = node.as_run(way)
        if seconds_on(run, kind) < math.inf:
            yield way, run.least_bytes


def _run_in_each_way(
    sizes: _Sizes, masks: Sequence[int], order: Sequence[str], emptiest_only: bool
) -> Iterator[Pipeline]:
    """Yields a chain of stages with their nodes run in each way that may fit, of the last node another one first."""
    nodes = sizes.graph.nodes
    stage_of = {number: stage for stage, mask in enumerate(masks) for number in sizes.nodes_of(mask)}
    kinds = [order[stage_of[number]] for number in range(len(nodes))]
    ways = [sizes.ways[kind][number] for number, kind in enumerate(kinds)]
    if emptiest_only:
        ways = [[min(each, key=lambda way: way[1])] for each in ways]
    least = [sizes.least[kind][number] for number, kind in enumerate(kinds)]
    spare = [
        sizes.limits[kind] * _ROUNDING - sum(least[number] for number, own in stage_of.items() if own == stage)
        for stage, kind in enumerate(order)
    ]
    """For each stage, what its nodes may keep beyond the least."""
    names = [node.name for node in nodes]
    untried = [iter(ways[0])]
    chosen: list[tuple[str, float]] = []
    """For each node so far: its way, and what its stage had to spare before."""
    while untried:
        number = len(chosen)
        stage = stage_of[number]
        found = next((each for each in untried[-1] if each[1] - least[number] <= spare[stage]), None)
        if found is not None:
            chosen.append((found[0], spare[stage]))
            spare[stage] -= found[1] - least[number]
            if len(chosen) < len(nodes):
                untried.append(iter(ways[len(chosen)]))
                continue
            yield _pipeline(sizes, masks, order, dict(zip(names, (way for way, _ in chosen), strict=True)))
        else:
            untried.pop()
        if chosen:
            _, before = chosen.pop()
            spare[stage_of[len(chosen)]] = before


def _pipeline(sizes: _Sizes, masks: Sequence[int], order: Sequence[str], way_of: Mapping[str, str]) -> Pipeline:
    rows = [tuple(sizes.graph.nodes[number].name for number in sizes.nodes_of(mask)) for mask in masks]
    return Pipeline(
        stages=tuple(
            PipelineStage(
                device_class=kind, nodes=names, options={name: way_of[name] for name in names if way_of[name]}
            )
            for kind, names in zip(order, rows, strict=True)
        )
    )


def _chains(prefixes: Sequence[int], count: int, may_be: Callable[[int], bool]) -> Iterator[list[int]]:
    """Yields all ways to cut a graph into so many stages that may be: the groups of each, as bits."""
    full = prefixes[-1]

    def ends(start: int, left: int) -> Iterator[int]:
        """Yields the prefixes at which a stage from `start` may end, with so many more behind it."""
        if left == 0:
            yield from [full] if start != full and may_be(full & ~start) else []
            return
        for end in prefixes:
            if end not in (start, full) and not start & ~end and may_be(end & ~start) and can_end(end, left - 1):
                yield end

    @functools.cache
    def can_end(start: int, left: int) -> bool:
        return any(True for _ in ends(start, left))

    def chains(start: int, left: int) -> Iterator[list[int]]:
        for end in ends(start, left):
            for later in chains(end, left - 1) if left else [[]]:
                yield [end & ~start, *later]

    yield from chains(0, count - 1)


def _orders(cluster: Cluster, count: int) -> Iterator[tuple[str, ...]]:
    """Yields all ways to take so many devices, by their classes."""
    names = [each.name for each in cluster.classes]
    for order in itertools.product(names, repeat=count):
        if all(order.count(each.name) <= each.num_devices for each in cluster.classes):
            yield order
