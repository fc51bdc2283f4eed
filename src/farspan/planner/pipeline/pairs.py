"""Computes what transfers between the stages of a pipeline take, by the two devices that each is between.

host 0  stage 0 --within-- stage 1
                              |
host 1  stage 3 --within-- stage 2       between

Stages take the devices of their class in order, host by host; one that would lie on two hosts, and need not, begins on
the next host if the devices are enough for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from farspan.cluster import Cluster, DeviceClass
from farspan.planner.cost_model import CostedEdge, CostedGraph
from farspan.planner.partition_dp.degree import of_degree
from farspan.planner.partition_dp.remat import choices_of
from farspan.planner.partition_dp.stages import Rules
from farspan.planner.pipeline.stage import PipelineStage

__all__ = ["by_pairs"]

_Hosts = frozenset[tuple[str, int]]


def by_pairs(
    graph: CostedGraph, cluster: Cluster, rules: Rules, stages: Sequence[PipelineStage]
) -> tuple[PipelineStage, ...]:
    """Returns the stages with the seconds that they take where they lie.

    Args:
        graph: What is run.
        cluster: Where.
        rules: What a step is.
        stages: In order; together they have all nodes.
    """
    kinds = {each.name: each for each in cluster.classes}
    of = [kinds[stage.device_class] for stage in stages]
    hosts = _hosts(cluster, of, stages)

    def link(one: int, other: int) -> float:
        if cluster.num_hosts == 1 or (hosts[one] == hosts[other] and len(hosts[one]) == 1):
            return min(of[one].within_bytes_per_s, of[other].within_bytes_per_s)
        return min(of[one].between_bytes_per_s, of[other].between_bytes_per_s)

    stage_of = {name: number for number, stage in enumerate(stages) for name in stage.nodes}
    moved_s = [0.0] * len(stages)
    uses: dict[tuple[str, str], list[CostedEdge]] = {}
    for edge in graph.edges:
        uses.setdefault((edge.source, edge.value), []).append(edge)
    for edges in uses.values():
        one, home = edges[0], stage_of[edges[0].source]
        there = sorted({stage_of[edge.target] for edge in edges} - {home})
        times = rules.times_moved(one)
        slowest = min((link(home, target) for target in there), default=0.0)
        for stage, bandwidth in [(home, slowest)] * bool(there) + [(target, link(home, target)) for target in there]:
            moved_s[stage] += times * (one.size_bytes / bandwidth + one.time_s + of[stage].latency_s)
    nodes = {node.name: node for node in graph.nodes}
    found: list[PipelineStage] = []
    for number, (stage, kind) in enumerate(zip(stages, of, strict=True)):
        degree, replicas = stage.tensor_parallel, stage.replicas
        once_s, parameter_bytes = moved_s[number], 0.0
        for name in stage.nodes:
            ways = {choice.name: choice.time_s for choice in choices_of(nodes[name], kind, degree)}
            once_s += ways[stage.options.get(name, "")]
            size, borders = of_degree(nodes[name], degree)
            parameter_bytes += size
            for neighbour, border_bytes in borders.items():
                if stage_of[neighbour] != number:
                    once_s += rules.passes * border_bytes / link(number, stage_of[neighbour])
        inside = kind.within_bytes_per_s if len(hosts[number]) == 1 else kind.between_bytes_per_s
        sync_s = rules.sync_passes * (replicas - 1) / replicas * parameter_bytes / inside
        found.append(
            replace(
                stage,
                once_s=once_s,
                rate_s=once_s / replicas + sync_s / rules.micro_batches,
                drain_s=(rules.micro_batches / replicas - 1) * once_s + sync_s,
            )
        )
    return tuple(found)


def _hosts(cluster: Cluster, of: Sequence[DeviceClass], stages: Sequence[PipelineStage]) -> list[_Hosts]:
    """Returns for each stage the hosts that its devices belong to."""
    left = {each.name: [host for _, host in cluster.devices(each)] for each in cluster.classes}
    needed = [stage.replicas * stage.tensor_parallel for stage in stages]
    found: list[_Hosts] = []
    for number, (stage, kind) in enumerate(zip(stages, of, strict=True)):
        devices, count = left[stage.device_class], needed[number]
        others = range(number + 1, len(stages))
        later = sum(needed[other] for other in others if stages[other].device_class == stage.device_class)
        spare = len(devices) - count - later
        starts = [start for start in range(spare + 1) if len({*devices[start : start + count]}) == 1]
        start = starts[0] if starts else 0
        found.append(frozenset((kind.whole, host) for host in devices[start : start + count]))
        left[stage.device_class] = devices[start + count :]
    return found
