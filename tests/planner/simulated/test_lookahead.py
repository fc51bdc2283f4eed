"""How far ahead a step runs: the planner asks for more micro-batches in flight where a step is shorter with them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from farspan.cluster import Cluster, DeviceClass
from farspan.planner.bound import bound_of
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode
from farspan.planner.optimize import best_plan
from farspan.planner.prediction import Prediction

NUM_MICRO_BATCHES = 16
COSTS: dict[str, Any] = {"forward_s": 1.0, "backward_s": 2.0, "parameter_bytes": 1.0, "saved_bytes": 1.0}
GRAPH = CostedGraph(
    nodes=tuple(CostedNode(name=name, **COSTS) for name in "ab"), edges=(CostedEdge(source="a", target="b"),)
)


def two_devices(*, latency_s: float, memory_bytes: float = math.inf) -> Cluster:
    kind = DeviceClass(name="gpu", kind="gpu", devices_per_host=2, latency_s=latency_s, memory_bytes=memory_bytes)
    return Cluster(classes=(kind,))


def best(*, latency_s: float, memory_bytes: float = math.inf) -> Prediction:
    return best_plan(GRAPH, two_devices(latency_s=latency_s, memory_bytes=memory_bytes), NUM_MICRO_BATCHES).best


def test_a_rank_far_away_is_kept_busy_by_more_micro_batches_in_flight() -> None:
    """A micro-batch is 19 s on its way from rank 0's forward to its backward: three of them do not fill that."""
    found = best(latency_s=8.0)
    assert found.plan.lookahead == 8 and found.stages[0].in_flight == 9
    bound = bound_of(GRAPH, two_devices(latency_s=8.0), NUM_MICRO_BATCHES).seconds
    assert found.step_s == pytest.approx(bound)


def test_as_far_as_there_is_memory() -> None:
    some, few = (best(latency_s=8.0, memory_bytes=limit) for limit in (5.0, 4.0))
    assert (some.plan.lookahead, some.stages[0].in_flight) == (4, 5)
    assert best(latency_s=8.0).step_s < some.step_s < few.step_s
    assert few.plan.lookahead == 2 and len(few.stages) == 1


def test_and_no_farther_than_it_helps() -> None:
    assert best(latency_s=0.0).plan.lookahead == 2
