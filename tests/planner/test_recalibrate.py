"""A step that has run sets the costs right, and a better plan is taken where it is better by more than the error."""

from __future__ import annotations

import pytest

from farspan.cluster import Cluster, DeviceClass
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode, NodeOption
from farspan.planner.optimize import Recalibration, StageSeconds, best_plan, recalibrate

AGAIN = NodeOption(name="remat", forward_s=0.01, backward_s=0.03)
NODES = tuple(CostedNode(name=f"b{i}", forward_s=0.01, backward_s={"gpu": 0.02}, options=(AGAIN,)) for i in range(4))
GRAPH = CostedGraph(nodes=NODES, edges=tuple(CostedEdge(source=f"b{i}", target=f"b{i + 1}") for i in range(3)))
CLUSTER = Cluster(classes=(DeviceClass(name="gpu", kind="gpu", devices_per_host=2),))


def after(first: float, second: float, measured_s: float | None = None) -> Recalibration:
    """Two stages of two nodes took so many times what was predicted; the step is as that makes it by default."""
    ran = best_plan(GRAPH, CLUSTER, 4).best
    assert [stage.nodes for stage in ran.stages] == [("b0", "b1"), ("b2", "b3")]
    taken = [StageSeconds(forward_s=0.02 * times, backward_s=0.04 * times) for times in (first, second)]
    found = recalibrate(GRAPH, CLUSTER, ran, taken, measured_s or 1.0)
    return found if measured_s else after(first, second, found.ran.step_s)


def test_what_took_longer_gives_work_away() -> None:
    found = after(1.0, 2.0)
    assert found.factors == pytest.approx((1.0, 2.0))
    assert found.ran.stages[1].forward_s == pytest.approx(0.04)
    assert found.ran.stages[1].backward_s == pytest.approx(0.08)
    assert [stage.nodes for stage in found.result.best.stages] == [("b0", "b1", "b2"), ("b3",)]
    assert found.is_worth_it and found.error == pytest.approx(0.0) and found.gain > 0.05


def test_all_that_took_longer_alike_stays_where_it_is() -> None:
    found = after(1.5, 1.5)
    assert found.gain == pytest.approx(0.0) and not found.is_worth_it
    assert found.ran.step_s == pytest.approx(1.5 * 5 * 0.06)


def test_a_gain_that_is_less_than_the_error_is_none() -> None:
    better = after(1.0, 2.0)
    unsure = after(1.0, 2.0, measured_s=better.measured_s * 2)
    assert unsure.error == pytest.approx(0.5)
    assert unsure.gain == pytest.approx(better.gain) and not unsure.is_worth_it
