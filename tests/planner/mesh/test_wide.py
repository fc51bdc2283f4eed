"""Plans with wide stages: found where they make a step shorter, as they are simulated; their parameters' ways count."""

from __future__ import annotations

import itertools

import pytest

from farspan.cluster import Cluster, DeviceClass
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode
from farspan.planner.mesh.wide import best_wide
from farspan.planner.optimize import best_plan
from farspan.planner.pipeline import Pipeline, PipelineStage
from farspan.planner.prediction import Prediction, predict_step

BYTES_PER_S = 1e9


def chain(costs: list[float], *, parameter_bytes: float = 0.0, together: tuple[int, ...] = ()) -> CostedGraph:
    nodes = tuple(
        CostedNode(
            name=f"layers.{number}",
            forward_s=cost,
            backward_s=2 * cost,
            parameter_bytes=parameter_bytes,
            memory_bytes=4 * parameter_bytes,
            saved_bytes=1e3,
            together="group" if number in together else None,
        )
        for number, cost in enumerate(costs)
    )
    edges = tuple(
        CostedEdge(source=f"layers.{number}", target=f"layers.{number + 1}", size_bytes=1e3)
        for number in range(len(costs) - 1)
    )
    return CostedGraph(nodes=nodes, edges=edges, source="a chain")


def devices(number: int, memory_bytes: float = 1e12) -> Cluster:
    kind = DeviceClass(
        name="device",
        kind="cpu",
        devices_per_host=number,
        memory_bytes=memory_bytes,
        within_bytes_per_s=BYTES_PER_S,
        between_bytes_per_s=BYTES_PER_S,
        latency_s=1e-5,
    )
    return Cluster(classes=(kind,))


def widths(found: Prediction) -> list[int]:
    return [stage.replicas for stage in found.pipeline.stages]


def every(graph: CostedGraph, cluster: Cluster, num_micro_batches: int) -> list[Prediction]:
    """All cuts of a chain and all widths that use all devices, of which some stage has several."""
    names, number = [node.name for node in graph.nodes], cluster.num_devices
    found: list[Prediction] = []
    for num_stages in range(1, min(number, len(names) + 1)):
        for cuts in itertools.combinations(range(1, len(names)), num_stages - 1):
            ends = [0, *cuts, len(names)]
            for ways in itertools.product(range(1, number + 1), repeat=num_stages):
                if sum(ways) == number:
                    stages = tuple(
                        PipelineStage(device_class="device", replicas=width, nodes=tuple(names[begin:end]))
                        for width, (begin, end) in zip(ways, itertools.pairwise(ends), strict=True)
                    )
                    found.append(predict_step(graph, cluster, Pipeline(stages=stages), num_micro_batches))
    return found


@pytest.mark.parametrize(
    ("costs", "number"), [([2.0, 1.0], 3), ([3.0, 1.0], 4), ([4.0, 1.0, 1.0, 1.0], 3), ([1.0, 5.0, 1.0, 2.0], 4)]
)
def test_it_is_about_as_short_as_the_best_of_all(costs: list[float], number: int) -> None:
    graph, cluster = chain(costs, parameter_bytes=1e8), devices(number)
    found = best_wide(graph, cluster, 8)
    assert found is not None
    assert found.step_s <= 1.1 * min(each.step_s for each in every(graph, cluster, 8))


def test_a_plan_is_wide_only_where_it_may_be_and_where_that_gains() -> None:
    slow_first, cluster = chain([2.0, 1.0], parameter_bytes=1e10), devices(3)
    narrow = best_plan(slow_first, cluster, 12)
    assert set(widths(narrow.best)) == {1}
    assert 'stages="wide" runs it' in [each.why for each in narrow.rejected]
    wide = best_plan(slow_first, cluster, 12, may_be_wide=True)
    assert wide.best.plan.stages == ("rank:0+rank:1", "rank:2")
    assert wide.best.step_s < narrow.best.step_s
    even = chain([1.0, 1.0], parameter_bytes=2e10)  # values and gradients take 10 s each
    assert set(widths(best_plan(even, devices(2), 12, may_be_wide=True).best)) == {1}


def test_gradients_are_added_up_exactly_where_that_hides_behind_compute() -> None:
    """Half of the parameters are another member's: a micro-batch takes 6 s, its gradients 5 s or 10 s."""
    for parameter_bytes, reduction in ((1e10, "exact"), (2e10, "sum")):
        graph = chain([2.0, 1.0], parameter_bytes=parameter_bytes)
        found = best_wide(graph, devices(3), 12)
        assert found is not None
        assert widths(found) == [2, 1]
        assert found.plan.gradient_reduction == reduction
    exact = best_wide(graph, devices(3), 12, reduction="exact")
    assert exact is not None
    assert exact.step_s > found.step_s


def test_what_stays_together_is_on_one_stage() -> None:
    found = best_wide(chain([1.0, 1.0, 1.0, 1.0], parameter_bytes=1e8, together=(0, 2)), devices(3), 8)
    assert found is not None
    stage_of = {name: number for number, stage in enumerate(found.pipeline.stages) for name in stage.nodes}
    assert stage_of["layers.0"] == stage_of["layers.1"] == stage_of["layers.2"]


def test_each_member_has_memory_for_all_of_its_stage() -> None:
    graph = chain([2.0, 1.0], parameter_bytes=1e8)
    assert best_wide(graph, devices(3, memory_bytes=5e8), 12) is None
    assert best_wide(graph, devices(3, memory_bytes=7e8), 12) is not None
