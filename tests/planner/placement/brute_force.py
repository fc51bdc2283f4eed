"""Small random graphs and clusters, and the best of all plans by trying all: definitions of its own, for tests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from hypothesis import strategies as st

from farspan.cluster import Cluster, DeviceClass
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode, NodeOption
from farspan.planner.cost_model.costed_graph import Seconds
from farspan.planner.partition_dp.stages import Rules

__all__ = ["all_chains", "clusters", "graphs", "pipeline_objectives"]


@st.composite
def graphs(draw: st.DrawFn, *, max_nodes: int = 8, options: bool = False, training: bool = False) -> CostedGraph:
    """Graphs whose nodes may need more memory than a device has, be allowed on some kinds only, and hang together."""
    num_nodes = draw(st.integers(1, max_nodes))
    costs = st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0])

    def by_kind(seconds: float) -> Seconds:
        """The same for all, or other seconds for each of some kinds."""
        kinds = draw(st.sampled_from(["", "", "", "a", "b", "ab"])) if options else ""
        return {kind: draw(costs) for kind in kinds} if kinds else seconds

    nodes: list[CostedNode] = []
    for number in range(num_nodes):
        memory, saved = draw(st.integers(0, 4)), draw(st.integers(0, 2)) if options else 0
        seconds = draw(costs)
        again, halved = by_kind(seconds + draw(costs)), by_kind(seconds * 0.75)
        remat = NodeOption(name="remat", forward_s=again, memory_bytes=memory, saved_bytes=saved / 2)
        half = NodeOption(name="half", tensor_parallel=2, forward_s=halved, memory_bytes=memory / 2)
        nodes.append(
            CostedNode(
                name=f"n{number}",
                forward_s=by_kind(seconds),
                memory_bytes=memory,
                saved_bytes=saved,
                parameter_bytes=draw(st.integers(0, 3)) if options else 0.0,
                devices=draw(st.sampled_from([None, None, None, ("a",), ("b",)])) if not options else None,
                together=draw(st.sampled_from([None, None, "x", "y"])) if not options else None,
                is_backward=training and draw(st.booleans()),
                options=(remat, half) if options and draw(st.booleans()) else (remat,) if options else (),
            )
        )
    sizes = [draw(costs) for _ in nodes]
    pairs = [pair for pair in itertools.combinations(range(num_nodes), 2) if draw(st.booleans())]
    edges = [
        CostedEdge(source=f"n{a}", target=f"n{b}", time_s=sizes[a])
        for a, b in pairs
        if not (nodes[a].is_backward and not nodes[b].is_backward)
    ]
    return CostedGraph(nodes=tuple(nodes), edges=tuple(edges))


@st.composite
def clusters(draw: st.DrawFn, *, max_devices: int = 3, bandwidth: float = math.inf) -> Cluster:
    """One or two classes: some devices with little memory, some slow."""
    first = draw(st.integers(1, max_devices))
    second = draw(st.integers(0, max_devices - first))
    classes = [
        DeviceClass(
            name=name,
            kind=name,
            devices_per_host=count,
            memory_bytes=draw(st.sampled_from([4.0, 8.0, 12.0, math.inf])),
            speed=draw(st.sampled_from([1.0, 2.0])),
            within_bytes_per_s=bandwidth,
            between_bytes_per_s=bandwidth,
        )
        for name, count in (("a", first), ("b", second))
        if count
    ]
    return Cluster(classes=tuple(classes))


def all_chains(graph: CostedGraph) -> Iterator[list[list[str]]]:
    """All ways to cut a graph into a chain of stages."""
    needs: dict[str, set[str]] = {node.name: set() for node in graph.nodes}
    for edge in graph.edges:
        needs[edge.target].add(edge.source)

    def rest(done: frozenset[str]) -> Iterator[list[list[str]]]:
        left = [node.name for node in graph.nodes if node.name not in done]
        if not left:
            yield []
        for size in range(1, len(left) + 1):
            for stage in itertools.combinations(left, size):
                if all(needs[name] <= done | set(stage) for name in stage):
                    for later in rest(done | set(stage)):
                        yield [list(stage), *later]

    return rest(frozenset())


def pipeline_objectives(graph: CostedGraph, cluster: Cluster, rules: Rules) -> Iterator[tuple[float, float]]:
    """(slowest rate, time of a step) of every pipeline: all stages, classes, replicas, degrees and options."""
    for stages in all_chains(graph):
        ways = [
            (kind, replicas, degree)
            for kind in cluster.classes
            for degree in (1, 2)
            for replicas in range(1, kind.num_devices + 1)
            if replicas * degree <= kind.num_devices and rules.micro_batches % replicas == 0
        ]
        for chosen in itertools.product(ways, repeat=len(stages)):
            if any(sum(r * t for kind, r, t in chosen if kind is each) > each.num_devices for each in cluster.classes):
                continue
            found = [_stage(graph, rules, stages, index, chosen) for index in range(len(stages))]
            if all(found):
                yield from _objectives(rules, chosen, found)


def _objectives(rules, chosen, found) -> Iterator[tuple[float, float]]:
    for combination in itertools.product(*found):  # the options of each stage are its own choice
        rates, fill, drain = [], 0.0, 0.0
        for (_, replicas, _), (once, sync) in zip(chosen, combination, strict=True):
            rates.append(once / replicas + sync / rules.micro_batches)
            fill += once
            drain = max(drain, (rules.micro_batches / replicas - 1) * once + sync)
        yield max(rates), fill + drain


def _seconds(given: Seconds, kind: DeviceClass) -> float:
    return given.get(kind.name, math.inf) if isinstance(given, Mapping) else given / kind.speed


def _stage(graph, rules, stages, index, chosen) -> list[tuple[float, float]]:
    """(once, sync) of a stage with its best options; empty where none fits."""
    kind, replicas, degree = chosen[index]
    later = sum(each[1] for each in chosen[index:])
    in_flight = min(max(math.ceil(later / replicas), 1), rules.micro_batches // replicas)
    mine = [node for node in graph.nodes if node.name in stages[index]]
    ways = [[each for each in (node, *node.options) if getattr(each, "tensor_parallel", 1) == degree] for node in mine]
    crossing = {
        (edge.source, edge.time_s)
        for edge in graph.edges
        if (edge.source in stages[index]) != (edge.target in stages[index])
    }
    best = math.inf
    for options in itertools.product(*ways):
        memory = sum(each.memory_bytes + in_flight * each.saved_bytes for each in options)
        if memory <= kind.memory_bytes:
            best = min(best, sum(_seconds(each.forward_s, kind) for each in options))
    if not all(ways) or math.isinf(best):
        return []
    once = best + rules.passes * sum(seconds for _, seconds in crossing)
    parameters = sum(
        node.parameter_bytes if degree == 1 else next(o.parameter_bytes for o in node.options if o.tensor_parallel == 2)
        for node in mine
    )
    bandwidth = kind.within_bytes_per_s
    return [(once, rules.sync_passes * (replicas - 1) / replicas * parameters / bandwidth)]
