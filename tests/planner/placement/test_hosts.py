"""Transfers are priced by the two devices that they are between."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from farspan.cluster import Cluster, DeviceClass
from farspan.planner import Rules, plan_pipeline
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode
from farspan.planner.optimize import best_plan

CLOSE = 1 + 1e-6


def hosts(count: int, devices: int, *, name: str = "gpu", **more: Any) -> DeviceClass:
    return DeviceClass(name=name, kind=name, num_hosts=count, devices_per_host=devices, **more)


def row(*seconds: float, size_bytes: float = 1.0) -> CostedGraph:
    nodes = tuple(CostedNode(name=f"n{i}", forward_s=each) for i, each in enumerate(seconds))
    pairs = itertools.pairwise(nodes)
    return CostedGraph(
        nodes=nodes, edges=tuple(CostedEdge(source=a.name, target=b.name, size_bytes=size_bytes) for a, b in pairs)
    )


TWO_BY_TWO = Cluster(classes=(hosts(2, 2, within_bytes_per_s=200.0, between_bytes_per_s=0.1),))


def test_one_of_two_hosts_where_the_link_between_them_is_slow() -> None:
    graph = row(1.0, 1.0)
    rules = Rules(micro_batches=1, passes=1.0, max_replicas=1)
    pipeline = plan_pipeline(graph, TWO_BY_TWO, rules=rules, objective="bottleneck")
    assert pipeline.value == pytest.approx(1.005) and pipeline.bound <= 1.005 * CLOSE
    result = best_plan(row(0.01, 0.01, size_bytes=0.001), TWO_BY_TWO, 8)
    assert len(result.best.stages) == 2 and result.best.step_s < 0.1
