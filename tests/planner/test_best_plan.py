"""The plan for a model, what its step will be like, and why others lost."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from tests.planner.given import predict_stages

from farspan.cluster import Cluster, DeviceClass
from farspan.errors import PlanError
from farspan.plan import Plan
from farspan.planner.bound import bound_of
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode, NodeOption
from farspan.planner.optimize import best_plan, explain, format_result, predict_step
from farspan.planner.pipeline import Pipeline
from farspan.schedule import orders_by_name

AGAIN = NodeOption(name="remat", forward_s=0.01, backward_s=0.03, saved_bytes=1e6, memory_bytes=16e6)


def chain(count: int = 4, *, options: tuple[NodeOption, ...] = (), skip: bool = False) -> CostedGraph:
    nodes = [
        CostedNode(
            name=f"blocks.{i}",
            forward_s=0.01,
            backward_s=0.02,
            parameter_bytes=4e6,
            saved_bytes=10e6,
            memory_bytes=16e6,
            options=options,
        )
        for i in range(count)
    ]
    edges = [CostedEdge(source=f"blocks.{i}", target=f"blocks.{i + 1}", size_bytes=1e6) for i in range(count - 1)]
    if skip:
        edges.append(CostedEdge(source="blocks.0", target=f"blocks.{count - 1}", size_bytes=1e6))
    return CostedGraph(nodes=tuple(nodes), edges=tuple(edges))


def devices(count: int, *, memory: float = math.inf, bandwidth: float = math.inf, latency: float = 0.0) -> Cluster:
    kind = DeviceClass(
        name="gpu",
        kind="gpu",
        devices_per_host=count,
        memory_bytes=memory,
        within_bytes_per_s=bandwidth,
        latency_s=latency,
    )
    return Cluster(classes=(kind,))


def test_a_step_is_as_long_as_the_pipeline_and_its_bubble() -> None:
    best = best_plan(chain(), devices(2), 4).best
    assert best.plan.placement == {"blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1}
    assert best.plan.stages == ("rank:0", "rank:1")
    assert best.step_s == pytest.approx((4 + 1) * 0.06)
    assert best.bubble == pytest.approx(1 / 5)
    assert best.link_bytes == {(0, 1): 4e6, (1, 0): 4e6}


def test_transfers_take_their_time() -> None:
    slow = best_plan(chain(), devices(2, bandwidth=1e9, latency=0.001), 4).best
    assert slow.step_s == pytest.approx((4 + 1) * 0.06 + 2 * 0.002)
    assert slow.transfer_s == {(0, 1): pytest.approx(0.004), (1, 0): pytest.approx(0.004)}


def test_a_value_that_skips_stages_goes_straight_to_its_user() -> None:
    best = best_plan(chain(skip=True), devices(4), 4).best
    assert len(best.stages) == 4 and best.link_bytes[0, 3] == 4e6


def test_each_link_carries_what_its_receiver_needs() -> None:
    graph = chain(3)
    tied = CostedEdge(source="blocks.0", target="blocks.2", size_bytes=64e6, value="weight", is_parameter=True)
    stages = [("gpu", [f"blocks.{i}"]) for i in range(3)]
    simulated = predict_stages(replace(graph, edges=(*graph.edges, tied)), devices(3), stages, 4)
    assert simulated.link_bytes == {(0, 1): 4e6, (1, 2): 4e6, (2, 1): 4e6, (1, 0): 4e6, (2, 0): 4 * 64e6}


def test_so_it_is_where_data_flow_back_to_a_stage() -> None:
    graph = chain(4)
    skip = CostedEdge(source="blocks.0", target="blocks.2", size_bytes=64e6, value="skip")
    stages = [("gpu", ["blocks.0", "blocks.3"]), ("gpu", ["blocks.1"]), ("gpu", ["blocks.2"])]
    simulated = predict_stages(replace(graph, edges=(*graph.edges, skip)), devices(3), stages, 4)
    assert {ends: size / 4e6 for ends, size in simulated.link_bytes.items()} == {
        (0, 1): 1,
        (1, 2): 1,
        (2, 0): 1 + 64,  # the second's output, and the gradient of what skips
        (0, 2): 1 + 64,
        (2, 1): 1,
        (1, 0): 1,
    }


def test_peak_memory_counts_the_micro_batches_in_flight() -> None:
    best = best_plan(chain(), devices(2), 8).best
    assert [stage.in_flight for stage in best.stages] == [3, 1]  # one ahead, to hide transfers
    first = 32e6 + 3 * (20e6 + 1e6) + 2e6  # what it sends is kept; a gradient in use, and the next one
    assert [stage.memory_bytes for stage in best.stages] == [first, 32e6 + (20e6 + 1e6) + 1e6]
    tight = best_plan(chain(), devices(2, memory=80e6), 8).best
    assert tight.plan.schedule == "1f1b"
    first = 32e6 + 2 * (20e6 + 1e6) + 2e6 + 1e6  # and in the forward what its second unit is given by its first
    assert [stage.memory_bytes for stage in tight.stages] == [first, 32e6 + (20e6 + 1e6) + 1e6 + 1e6]


def test_what_does_not_fit_is_computed_again() -> None:
    best = best_plan(chain(options=(AGAIN,)), devices(2, memory=60e6), 8).best
    names = best.plan.remat
    assert isinstance(names, tuple) and set(names) <= {"blocks.0", "blocks.1"}
    assert best.stages[0].memory_bytes <= 60e6 and best.stages[0].backward_s == pytest.approx(0.04 + 0.01 * len(names))


def test_do_not_distribute_where_one_device_is_fastest() -> None:
    result = best_plan(chain(), devices(2, bandwidth=1e6), 4)
    assert len(result.best.stages) == 1 and result.best.plan.placement == {"": 0}
    assert "do not distribute" in format_result(result)


def test_where_nothing_fits_the_error_says_what_would() -> None:
    with pytest.raises(PlanError) as caught:
        best_plan(chain(), devices(2, memory=64e6), 8)
    assert "no plan fits 2 devices of 61.0 MiB" in caught.value.what
    assert "61.0 MiB" in caught.value.why and "38.1 MiB" in caught.value.why
    assert caught.value.hint == "16 micro-batches, each 2 times smaller, or\n4 devices, or\ndevices of 122.1 MiB"


def test_peak_memory_counts_what_a_unit_needs_while_it_runs() -> None:
    def peaks(*working: float) -> list[float]:
        graph = chain(2)
        nodes = tuple(replace(node, working_bytes=size) for node, size in zip(graph.nodes, working, strict=True))
        best = best_plan(replace(graph, nodes=nodes), devices(1), 4).best
        return [stage.memory_bytes for stage in best.stages]

    assert peaks(0.0, 5e6) == [32e6 + 20e6 + 5e6]
    assert peaks(5e6, 0.0) == [
        32e6 + 20e6 + 1e6
    ]  # by then the second has given back 10 MB; what it is given in the forward
    assert peaks(12e6, 1e6) == [32e6 + 20e6 + 2e6]


def test_what_is_released_counts_where_the_gradient_was_made_at_the_same_stage() -> None:
    def first_peak(num_devices: int, release: float) -> float:
        first, second = chain(2).nodes
        first = replace(first, working_bytes=15e6, released_bytes=release)
        graph = replace(chain(2), nodes=(first, second))
        return best_plan(graph, devices(num_devices), 4).best.stages[0].memory_bytes

    assert first_peak(1, release=2e6) == first_peak(1, release=0.0) - 2e6
    assert first_peak(2, release=2e6) == first_peak(2, release=0.0)


def test_what_is_saved_anyway_is_not_held_again_to_be_sent() -> None:
    graph = chain()
    saved = replace(graph, edges=tuple(replace(edge, is_saved=True) for edge in graph.edges))
    best = best_plan(saved, devices(2), 8).best
    assert [stage.memory_bytes for stage in best.stages] == [32e6 + 3 * 20e6 + 2e6, 32e6 + 21e6 + 1e6]


def test_a_plan_that_fits_only_without_what_units_need_is_not_taken() -> None:
    graph = chain(options=(AGAIN,))
    needing = replace(graph, nodes=tuple(replace(node, working_bytes=6e6) for node in graph.nodes))
    cluster = devices(2, memory=77e6)
    assert not any(stage.remat for stage in best_plan(graph, cluster, 8).best.stages)
    best = best_plan(needing, cluster, 8).best
    assert best.fits and any(stage.remat for stage in best.stages)


def test_the_order_is_the_one_that_the_runtime_makes() -> None:
    graph, cluster = chain(3), devices(3)
    even = best_plan(graph, cluster, 8).best.pipeline
    uneven = replace(graph.nodes[1], forward_s=0.2, backward_s=0.01)
    uneven_graph = replace(graph, nodes=(graph.nodes[0], uneven, graph.nodes[2]))
    schedule = predict_step(uneven_graph, cluster, even, 8).simulation.schedule
    nominal = tuple(replace(task, duration=2.0 if task.kind.value == "B" else 1.0) for task in schedule.tasks)
    orders = orders_by_name("auto", nominal, 3, run_ahead=1)
    assert orders != orders_by_name("auto", schedule.tasks, 3, run_ahead=1)
    assert list(map(list, schedule.orders)) == orders


def test_the_others_say_why_they_lost() -> None:
    result = best_plan(chain(), devices(4), 4)
    by_what = {each.what: each for each in result.rejected}
    assert by_what["one device"].step_s == pytest.approx(0.48)
    assert by_what["2 devices"].why == "rank:0 takes 60.0 ms for each micro-batch, the slowest rank of the plan 30.0 ms"
    assert by_what["stages of 4 devices"].why == 'stages="wide" runs it'


def test_no_cut_beats_the_bound() -> None:
    """Every way to cut a small chain into stages, simulated."""
    seconds = (0.03, 0.01, 0.02, 0.05, 0.01, 0.04)
    nodes = tuple(CostedNode(name=str(i), forward_s=s, backward_s=2 * s) for i, s in enumerate(seconds))
    edges = tuple(CostedEdge(source=str(i), target=str(i + 1)) for i in range(5))
    graph = CostedGraph(nodes=nodes, edges=edges)
    for num_devices, micro_batches in itertools.product((2, 3), (1, 2, 5)):
        cluster = devices(num_devices)
        result = best_plan(graph, cluster, micro_batches)
        simulated = [
            predict_step(graph, cluster, _cut(result.best.pipeline, (0, *cuts, 6)), micro_batches).step_s
            for count in range(num_devices)
            for cuts in itertools.combinations(range(1, 6), count)
        ]
        assert bound_of(graph, cluster, micro_batches).seconds <= min(simulated), (num_devices, micro_batches)
        assert result.best.step_s <= min(simulated) * 1.000001, (num_devices, micro_batches)


def _cut(pipeline: Pipeline, ends: tuple[int, ...]) -> Pipeline:
    names = [str(i) for i in range(6)]
    stages = [replace(pipeline.stages[0], nodes=tuple(names[a:b])) for a, b in itertools.pairwise(ends)]
    return replace(pipeline, stages=tuple(stages))


def test_branches_that_do_not_wait_for_each_other_have_no_chain_bound() -> None:
    nodes = tuple(CostedNode(name=name, forward_s=1.0, backward_s=2.0) for name in "ab")
    graph = CostedGraph(nodes=nodes)
    assert best_plan(graph, devices(2), 4).best.step_s == pytest.approx(12.0)
    assert bound_of(graph, devices(2), 4).seconds == pytest.approx(12.0)


def test_ranks_count_host_by_host() -> None:
    old = DeviceClass(name="old", kind="old", devices_per_host=1)
    new = DeviceClass(name="new", kind="new", devices_per_host=2, speed=2.0)
    nodes = tuple(CostedNode(name=str(i), forward_s=1.0, devices=("old",) if i == 2 else ("new",)) for i in range(4))
    edges = tuple(CostedEdge(source=str(i), target=str(i + 1)) for i in range(3))
    result = best_plan(CostedGraph(nodes=nodes, edges=edges), Cluster(classes=(new, old)), 4)
    assert result.best.plan.stages == ("rank:0", "rank:2", "rank:1")
    assert "ranks 0 to 1 on new, 2 on old" in format_result(result)


def test_why_a_module_is_where_it_is() -> None:
    graph, cluster = chain(), devices(2)
    result = best_plan(graph, cluster, 4)
    text = explain(result, "blocks.1")
    assert "blocks.1 is on rank:0, stage 0" in text
    assert "with rank:1 the step would take 390 ms" in text  # 30 ms, then 4 x 90 ms
    with pytest.raises(PlanError, match=r"no unit called 'blocks\.9'"):
        explain(result, "blocks.9")


def test_the_plan_shows_what_is_expected_of_it() -> None:
    plan = best_plan(chain(), devices(2, memory=1e9), 4).best.plan
    assert "peak memory" in str(plan) and "80 %" in str(plan)
    assert Plan.from_json(plan.to_json()).estimates == plan.estimates


def test_a_node_of_next_to_no_time_is_no_part_of_the_row() -> None:
    """It may be in any stage: neither its memory nor its devices say anything of the others beside it."""
    nodes = (
        CostedNode(name="a", forward_s=10.0, backward_s=20.0, memory_bytes=1.0),
        CostedNode(name="b", forward_s=1.0, backward_s=2.0, memory_bytes=1.0, devices=("slow",)),
        CostedNode(name="tiny", forward_s=1e-9, memory_bytes=9.0),
    )
    graph = CostedGraph(nodes=nodes, edges=(CostedEdge(source="a", target="b"),))
    fast = DeviceClass(name="fast", kind="fast", speed=10.0, memory_bytes=5.0)
    cluster = Cluster(classes=(fast, DeviceClass(name="slow", kind="slow", memory_bytes=20.0)))
    for num_micro_batches in (1, 4):
        found = predict_stages(graph, cluster, [("fast", ["a"]), ("slow", ["b", "tiny"])], num_micro_batches)
        assert found.fits and bound_of(graph, cluster, num_micro_batches).seconds <= found.step_s
