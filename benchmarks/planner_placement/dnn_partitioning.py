"""Workloads of dnn-partitioning (Tarnawski et al., NeurIPS 2020) as costed graphs; their JSON is read here only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from farspan.cluster import Cluster, DeviceClass
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode

__all__ = ["CPU", "read_workload"]

CPU = "cpu"
"""The class of devices on which transfers take no time."""


def read_workload(path: Path) -> tuple[CostedGraph, Cluster]:
    """The graph, and accelerators and CPUs as the file says; milliseconds stay what they are, called seconds."""
    data: dict[str, Any] = json.loads(path.read_text())
    nodes = tuple(
        CostedNode(
            name=str(node["id"]),
            forward_s={"accelerator": node["fpgaLatency"], "cpu": node["cpuLatency"]},
            memory_bytes=float(node.get("size", 0.0)),
            devices=None if node["supportedOnFpga"] else ("cpu",),
            together=None if node.get("colorClass") is None else str(node["colorClass"]),
            is_backward=bool(node["isBackwardNode"]),
        )
        for node in data["nodes"]
    )
    edges = {
        (edge["sourceId"], edge["destId"]): CostedEdge(
            source=str(edge["sourceId"]), target=str(edge["destId"]), time_s=edge["cost"]
        )
        for edge in data["edges"]
    }
    classes = [
        DeviceClass(
            name="accelerator",
            kind="accelerator",
            devices_per_host=data["maxFPGAs"],
            memory_bytes=data["maxSizePerFPGA"],
        )
    ]
    if data["maxCPUs"]:
        classes.append(DeviceClass(name=CPU, kind="cpu", devices_per_host=data["maxCPUs"]))
    return CostedGraph(nodes=nodes, edges=tuple(edges.values()), source=path.name), Cluster(classes=tuple(classes))
