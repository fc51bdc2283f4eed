"""Instances of Piper (Tarnawski et al., NeurIPS 2021) as costed graphs; their JSON is read here only.

A layer has, for each tensor-parallel degree, some ways to run (time, parameters, memory a y + b with y micro-batches in
flight, synchronisation over cut edges). An edge costs each stage that it leaves or enters, on its own.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from farspan.cluster import Cluster, DeviceClass
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode, NodeOption
from farspan.planner.partition_dp.stages import Rules
from farspan.planner.pipeline import Pipeline

__all__ = ["evaluate", "read_instance"]


def read_instance(
    path: Path, *, memory_bytes: float, num_devices: int, bandwidth: float
) -> tuple[CostedGraph, Cluster, Rules]:
    """The graph, that many devices, and Piper's objective."""
    data: dict[str, Any] = json.loads(path.read_text())
    edges = [
        CostedEdge(
            source=str(edge["sourceId"]),
            target=str(edge["destId"]),
            size_bytes=edge["communicationCost"],
            value=str(edge["destId"]),  # charged for each edge
        )
        for edge in data["edges"]
    ]
    cluster = Cluster(
        classes=(
            DeviceClass(
                name="device",
                kind="device",
                devices_per_host=num_devices,
                memory_bytes=memory_bytes,
                within_bytes_per_s=bandwidth,
                between_bytes_per_s=bandwidth,
            ),
        )
    )
    batch = int(data.get("mbsInBatch") or data["maxBatchSize"])
    graph = CostedGraph(nodes=tuple(map(_node, data["nodes"])), edges=tuple(edges), source=path.name)
    return graph, cluster, Rules(micro_batches=batch, passes=2.0, sync_passes=4.0)


def evaluate(path: Path, plan: Pipeline, *, memory_bytes: float, num_devices: int, bandwidth: float) -> float:
    """Time per sample of a plan by Piper's definition, from the file alone; infinite where it breaks a limit."""
    data: dict[str, Any] = json.loads(path.read_text())
    batch = int(data.get("mbsInBatch") or data["maxBatchSize"])
    layers = {str(node["id"]): node for node in data["nodes"]}
    stage_of = {name: index for index, stage in enumerate(plan.stages) for name in stage.nodes}
    assert stage_of.keys() == layers.keys(), "each layer lies in one stage"
    assert all(stage_of[str(edge["sourceId"])] <= stage_of[str(edge["destId"])] for edge in data["edges"])
    assert all(batch % stage.replicas == 0 for stage in plan.stages)
    if sum(stage.replicas * stage.tensor_parallel for stage in plan.stages) > num_devices:
        return math.inf
    slowest = 0.0
    for index, stage in enumerate(plan.stages):
        later = sum(each.replicas for each in plan.stages[index:])
        seconds = border = sync = memory = 0.0
        for name in stage.nodes:
            ways = layers[name]["TMPCs"][str(stage.tensor_parallel)]
            way = next(way for way in ways if way["id"] == stage.options.get(name, ways[0]["id"]))
            seconds += way["timePerSample"]
            sync += 4 * (stage.replicas - 1) * way["parameterSize"] / stage.replicas / batch
            memory += way["memoryUsageA"] * -(-later // stage.replicas) + way["memoryUsageB"]
            for neighbours in ("syncTimeFw", "syncTimeBw"):
                border += sum(2 * size for other, size in way[neighbours].items() if stage_of[other] != index)
        for edge in data["edges"]:
            ends = {stage_of[str(edge["sourceId"])], stage_of[str(edge["destId"])]}
            border += 2 * edge["communicationCost"] if index in ends and len(ends) == 2 else 0.0
        if memory > memory_bytes * (1 + 1e-9):
            return math.inf
        slowest = max(slowest, (border / stage.replicas + sync) / bandwidth + seconds / stage.replicas)
    return slowest


def _node(data: dict[str, Any]) -> CostedNode:
    options = [
        NodeOption(
            name=way["id"],
            tensor_parallel=int(degree),
            forward_s=way["timePerSample"],
            parameter_bytes=way["parameterSize"],
            saved_bytes=way["memoryUsageA"],
            memory_bytes=way["memoryUsageB"],
            border_bytes={**way["syncTimeFw"], **way["syncTimeBw"]},
        )
        for degree, ways in data["TMPCs"].items()
        for way in ways
    ]
    first = next(option for option in options if option.tensor_parallel == 1)
    return CostedNode(
        name=str(data["id"]),
        forward_s=first.forward_s,
        parameter_bytes=first.parameter_bytes,
        saved_bytes=first.saved_bytes,
        memory_bytes=first.memory_bytes,
        options=tuple(options),
    )
