"""Where memory is tight, a search ends after bounded work: with a plan, with proof that there is none, or saying that
none was found.
"""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from tests.planner.placement.brute_force import all_chains
from tests.planner.simulated.test_every_plan import clusters, graphs

from farspan.cluster import Cluster, DeviceClass
from farspan.errors import PlanError
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode, NodeOption
from farspan.planner.optimize import best_plan, fitting
from farspan.planner.optimize.every import every_pipeline
from farspan.planner.partition_dp.remat import Choice, make_steps
from farspan.planner.partition_dp.stages import Rules


def blocks(count: int, *, working_bytes: float = 0.0) -> CostedGraph:
    """A chain of blocks that hold 1 byte, and keep 10 of a micro-batch, or 2 where they are computed again."""
    again = NodeOption(name="remat", forward_s=0.01, backward_s=0.03, saved_bytes=2.0, memory_bytes=1.0)
    nodes = tuple(
        CostedNode(
            name=f"blocks.{i}",
            forward_s=0.01,
            backward_s=0.02,
            memory_bytes=1.0,
            saved_bytes=10.0,
            working_bytes=working_bytes,
            options=(again,),
        )
        for i in range(count)
    )
    edges = (CostedEdge(source=f"blocks.{i}", target=f"blocks.{i + 1}", size_bytes=0.1) for i in range(count - 1))
    return CostedGraph(nodes=nodes, edges=tuple(edges))


def devices(count: int, memory: float) -> Cluster:
    return Cluster(classes=(DeviceClass(name="x", kind="x", devices_per_host=count, memory_bytes=memory),))


@pytest.mark.timeout(100)
def test_a_search_ends_where_there_are_too_many_ways_to_run_what_does_not_fit() -> None:
    """Twenty blocks computed again hold 60 bytes of 95, and need 48 more while one runs. Few of 2**40 ways may fit; the
    others were skipped one by one, and nobody counted.
    """
    with pytest.raises(PlanError) as caught:
        best_plan(blocks(40, working_bytes=40.0), devices(2, 95.0), 1)
    assert caught.value.what == "no plan was found that fits 2 devices of 95 B."
    assert "Not all plans could be tried in " in caught.value.why and "one may fit" in caught.value.why


@pytest.mark.timeout(100)
def test_fewer_devices_that_do_not_do_are_compared_in_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "_MOST_TASKS_OF_ALL", 10_000)
    graph, cluster = blocks(40, working_bytes=40.0), devices(3, 95.0)
    result = best_plan(graph, cluster, 1)
    assert len(result.best.stages) == 3 and result.best.fits
    assert {each.what: each.why for each in result.rejected} == {
        "2 devices": "none was found that fits into their memory",
        "one device": "it does not fit into its memory",
    }
    seconds = itertools.count(0.0, 1e6)
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))  # no clock decides
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    assert best_plan(graph, cluster, 1).best.plan == result.best.plan


def test_where_all_plans_were_tried_none_fits() -> None:
    with pytest.raises(PlanError) as caught:
        best_plan(blocks(4, working_bytes=9.0), devices(2, 12.0), 1)
    assert caught.value.what == "no plan fits 2 devices of 12 B." and "may fit" not in caught.value.why


def test_a_list_without_any_pipeline_ends_with_the_budget() -> None:
    charged: list[float] = []

    def charge(num_tasks: float) -> bool:
        charged.append(num_tasks)
        return len(charged) < 100

    some = [*blocks(2).nodes, *(CostedNode(name=f"n{i}") for i in range(58))]
    only_x = DeviceClass(name="x", kind="x", memory_bytes=5.0)
    small = [DeviceClass(name=name, kind=name, memory_bytes=0.0) for name in "abcd"]
    edges = tuple(CostedEdge(source=a.name, target=b.name) for a, b in itertools.pairwise(some))
    graph = CostedGraph(nodes=tuple(some), edges=edges)
    assert not list(every_pipeline(graph, Cluster(classes=(only_x, *small)), Rules(micro_batches=1), charge))
    assert len(charged) == 100


@settings(max_examples=60, deadline=None)
@given(graph=graphs(), cluster=clusters())
def test_what_is_left_out_of_the_list_could_not_fit(graph: CostedGraph, cluster: Cluster) -> None:
    listed = {
        tuple((stage.device_class, stage.nodes, tuple(stage.options.items())) for stage in each.stages)
        for each in every_pipeline(graph, cluster, Rules(micro_batches=1), lambda num_tasks: True)
    }
    nodes, kinds = {node.name: node for node in graph.nodes}, {each.name: each for each in cluster.classes}
    places = [each.name for each in cluster.classes for _ in range(each.num_devices)]
    expected: set[object] = set()
    for chain in all_chains(graph):
        for order in set(itertools.permutations(places, len(chain))):
            for ways in itertools.product(*(node.names_of_ways for node in graph.nodes)):
                way_of = dict(zip(nodes, ways, strict=True))
                held = [sum(nodes[name].as_run(way_of[name]).least_bytes for name in names) for names in chain]
                if all(size <= kinds[kind].memory_bytes for size, kind in zip(held, order, strict=True)):
                    expected.add(
                        tuple(
                            (kind, tuple(names), tuple((name, way_of[name]) for name in names if way_of[name]))
                            for kind, names in zip(order, chain, strict=True)
                        )
                    )
    assert listed == expected


@pytest.mark.parametrize("memory", [5.0, 20.0, 61.0])
def test_what_would_help_is_said_of_nodes_that_keep_the_same(memory: float) -> None:
    """Of batches that are so many times smaller, what nodes share is smaller as well."""
    graph = blocks(8)
    nodes = tuple(
        CostedNode(
            name=node.name,
            forward_s=0.01,
            backward_s=0.02,
            memory_bytes=node.memory_bytes,
            saved_bytes=100.0,
            working_bytes=4.0,
            released_bytes=4.0,
            left_bytes=50.0,
            shared_bytes={f"value {number // 2}": 100.0},
        )
        for number, node in enumerate(graph.nodes)
    )
    with pytest.raises(PlanError) as caught:
        best_plan(CostedGraph(nodes=nodes, edges=graph.edges), devices(2, memory), 1)
    assert caught.value.what == f"no plan fits 2 devices of {memory:.0f} B."


def test_the_ways_that_are_chosen_for_a_stage_cost_what_the_search_has_counted() -> None:
    """In the order of seconds per byte the first two save enough, and the last two do so in less."""
    steps = [(6.0, 6.0), (5.0, 5.5), (5.0, 5.5)]
    choices = [
        [
            Choice(name="", time_s=1.0, saved_bytes=10.0, memory_bytes=0.0),
            Choice(name="remat", time_s=1.0 + extra_s, saved_bytes=10.0 - saved, memory_bytes=0.0),
        ]
        for saved, extra_s in steps
    ]
    members = np.array([[False] * 3, [True] * 3])
    made = make_steps(choices, [0, 1, 2], [0, 0, 0], [1], members)
    for missing in (0.0, 4.0, 5.0, 6.0, 8.0, 10.0, 11.0, 13.0, 16.0):
        counted = made.extra(0, np.array([1]), np.array([[missing]]), np.array([3.0]))[0, 0]
        chosen = [node for node, choice in made.chosen(0, {0, 1, 2}, missing).items() if choice]
        assert sum(steps[node][1] for node in chosen) == pytest.approx(counted)
        assert sum(steps[node][0] for node in chosen) >= missing


def test_what_a_node_needs_while_it_runs_decides_which_are_computed_again() -> None:
    """Four blocks hold 44 bytes; with the 9 of one that runs they are 53 of 50, and 45 with one computed again."""
    found = fitting.best_pipeline(blocks(4, working_bytes=9.0), devices(1, 50.0), Rules(micro_batches=1))
    assert found is not None and list(found.stages[0].options.values()) == ["remat"]
    roomy = fitting.best_pipeline(blocks(4, working_bytes=9.0), devices(1, 53.0), Rules(micro_batches=1))
    assert roomy is not None and not roomy.stages[0].options
