"""What hints mean, what contradicts, and plans under them that can be foreseen."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from tests.planner.test_best_plan import AGAIN, chain, devices

from farspan.cluster import Cluster, DeviceClass
from farspan.errors import PlanError
from farspan.planner import Hints, Rules, Unit, auto_plan, plan_pipeline
from farspan.planner.constraints import hinted_problem
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode
from farspan.planner.optimize import best_plan, explain, format_result

ATOMS = [
    Unit(name="embed", cost=0.2, num_parameters=100, parameter_bytes=400),
    *(Unit(name=f"blocks.{i}", cost=1.0, num_parameters=10, parameter_bytes=40) for i in range(4)),
    Unit(name="head", cost=0.1, num_parameters=5, parameter_bytes=20),
]


def automatic(num_ranks: int, **hints: Any) -> dict[str, str]:
    """Where the estimated plan puts what."""
    ranks = [f"rank:{rank}" for rank in range(num_ranks)]
    plan = auto_plan(ATOMS, num_stages=num_ranks, devices=ranks, hints=Hints(**hints))
    assert set(plan.placement.values()) == set(range(num_ranks)) and plan.ranks == set(range(num_ranks))
    return {name: plan.stages[stage] for name, stage in plan.placement.items()}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"pins": 3}, "pins=3 cannot be"),
        ({"pins": {"a": "gpu:0"}}, "'gpu:0' is not a place"),
        ({"together": "embed"}, "together='embed' cannot be"),
        ({"together": ["embed", "head"]}, "together='embed' cannot be"),
        ({"together": [[]]}, "cannot be"),
        ({"max_memory": "14 apples"}, "max_memory='14 apples' is no size"),
        ({"max_memory": 0}, "is no size"),
        ({"max_memory": True}, "is no size"),
        ({"max_memory": {"rank:0": "x"}}, "is no size"),
        ({"max_memory": {"cpu": "1GiB"}}, "is not a place"),
        ({"max_memory": {"rank:0/cpu": "1GiB"}}, "is a device of a rank"),
        ({"stages": 0}, "stages=0 is not a number"),
        ({"remat": 3}, '"remat" cannot be 3'),
    ],
)
def test_what_is_no_hint_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as caught:
        Hints(**values)
    assert said in caught.value.what and caught.value.hint


@pytest.mark.parametrize(
    ("values", "said", "hint"),
    [
        ({"pins": {"blok.*": "rank:0"}}, "the hint 'blok.*' matches nothing", "'blocks'"),
        ({"together": [["embed", "haed"]]}, "the hint 'haed' matches nothing", "'head'"),
        ({"pins": {"head": "rank:2"}}, "pins: 'head': there is no rank 2", '"rank:1"'),
        ({"max_memory": {"rank:2": 1}}, "max_memory: there is no rank 2", '"rank:1"'),
        (
            {"pins": {"embed": "rank:0", "head": "rank:1"}, "together": [["embed", "head"]]},
            "'embed' to rank:0 ('embed'), 'head' to rank:1 ('head')",
            '"head": "rank:0"',
        ),
        ({"pins": {"embed": "rank:0/cpu", "head": "rank:0/cuda:0"}}, "pins contradict", '"head": "rank:0/cpu"'),
    ],
)
def test_hints_that_cannot_be_are_refused_before_the_search(values: dict[str, Any], said: str, hint: str) -> None:
    for search in (
        lambda: automatic(2, **values),
        lambda: best_plan(named("embed", "blocks", "head"), devices(2), 4, hints=Hints(**values)),
    ):
        with pytest.raises(PlanError) as caught:
            search()
        assert said in caught.value.what and hint in caught.value.hint


def named(*names: str) -> CostedGraph:
    nodes = tuple(CostedNode(name=name, forward_s=1.0, backward_s=2.0, memory_bytes=10.0) for name in names)
    edges = tuple(CostedEdge(source=a, target=b, size_bytes=1.0) for a, b in pairwise(names))
    return CostedGraph(nodes=nodes, edges=edges)


def test_an_exact_name_beats_a_pattern_and_of_patterns_the_later_wins() -> None:
    found = automatic(3, pins={"blocks.0": "rank:2", "blocks.*": "rank:0", "blocks.[23]": "rank:1"})
    assert found == {
        "blocks.0": "rank:2",
        "embed": "rank:2",
        "blocks.1": "rank:0",
        "blocks.2": "rank:1",
        "blocks.3": "rank:1",
        "head": "rank:1",
    }


def test_what_is_apart_in_the_row_can_be_together() -> None:
    found = automatic(2, together=[["embed", "head"]])
    assert found["embed"] == found["head"] and len(set(found.values())) == 2
    found = automatic(2, pins={"blocks.0": "rank:0", "blocks.1": "rank:1", "blocks.2": "rank:0", "blocks.3": "rank:1"})
    assert [found[f"blocks.{i}"] for i in range(4)] == ["rank:0", "rank:1", "rank:0", "rank:1"]


def test_the_estimated_plan_counts_parameters_and_their_gradients() -> None:
    assert automatic(2)["blocks.1"] == "rank:0"
    assert automatic(2, max_memory=2 * 440)["blocks.1"] == "rank:1"
    assert automatic(2, max_memory={"rank:0": 2 * 200})["embed"] == "rank:1"
    with pytest.raises(PlanError) as caught:
        automatic(2, max_memory=2 * 399)
    assert caught.value.what == "no plan keeps the hint max_memory='798 B'."
    assert caught.value.hint == "several times that max_memory, or leave that one out"  # a step takes more
    with pytest.raises(PlanError) as caught:
        automatic(2, max_memory="1B")
    assert caught.value.why.endswith(
        "\nParameters and gradients alone need about max_memory='807 B', optimizer and activations more."
    )
    with pytest.raises(PlanError) as caught:
        automatic(2, max_memory={"rank:0": 10, "rank:1": 1})
    assert "leave that one out" in caught.value.hint


def test_hints_and_several_stages_on_a_rank_are_refused() -> None:
    with pytest.raises(PlanError, match="stages=4 on 2 ranks cannot be planned"):
        auto_plan(ATOMS, num_stages=4, devices=["rank:0", "rank:1"], hints=Hints(pins={"head": "rank:0"}))


def test_a_device_in_a_pin_is_the_stage_s() -> None:
    assert automatic(2, pins={"head": "rank:1/cpu", "blocks.3": "rank:1"})["blocks.3"] == "rank:1/cpu"
    best = best_plan(chain(), devices(2), 4, hints=Hints(pins={"blocks.0": "rank:1/cuda:0"})).best
    assert best.plan.stages == ("rank:1/cuda:0", "rank:0")


def test_memory_is_the_least_of_the_device_s_and_the_hint_s() -> None:
    limits = [
        stage.limit_bytes
        for hint in ("80MB", "90MB")
        for stage in best_plan(chain(), devices(2, memory=85e6), 8, hints=Hints(max_memory=hint)).best.stages
    ]
    assert limits == [80e6, 80e6, 85e6, 85e6]
    best = best_plan(chain(options=(AGAIN,)), devices(2), 8, hints=Hints(max_memory={"rank:0": "60MB"})).best
    assert (
        best.fits
        and min(stage.limit_bytes for stage in best.stages) == 60e6
        and math.inf in {stage.limit_bytes for stage in best.stages}
    )


def test_so_many_stages_as_are_asked_for() -> None:
    slow = devices(4, bandwidth=1e6)
    assert len(best_plan(chain(), slow, 4).best.stages) == 1
    for count in (1, 2, 3, 4):
        result = best_plan(chain(), slow, 4, hints=Hints(stages=count))
        assert len(result.best.stages) == count and result.bound <= result.best.step_s
    with pytest.raises(PlanError, match="stages=5 are more than there are devices"):
        best_plan(chain(), slow, 4, hints=Hints(stages=5))
    with pytest.raises(PlanError, match=r"pins: 'blocks\.0': there is no rank 3") as caught:
        best_plan(chain(), slow, 4, hints=Hints(stages=2, pins={"blocks.0": "rank:3"}))
    assert caught.value.hint == '"rank:1", or stages=4'


def test_a_pinned_rank_is_that_device_of_the_cluster() -> None:
    """Also where faster ones would do alone: a plan's ranks have no gaps."""
    slow = DeviceClass(name="slow", kind="slow", devices_per_host=2)
    fast = DeviceClass(name="fast", kind="fast", devices_per_host=2, speed=100.0)
    cluster = Cluster(classes=(slow, fast))
    assert {stage.device for stage in best_plan(chain(), cluster, 4).best.stages} == {"fast"}
    result = best_plan(chain(), cluster, 4, hints=Hints(pins={"blocks.3": "rank:2"}))
    of_rank = {stage.where: stage for stage in result.best.stages}
    assert [of_rank[f"rank:{rank}"].device for rank in range(3)] == ["slow", "slow", "fast"]
    assert "blocks.3" in of_rank["rank:2"].nodes
    assert "ranks 0 to 1 on slow, 2" in format_result(result)


@pytest.mark.parametrize("stages", [None, 12])
def test_classes_one_after_the_other_where_their_product_is_too_large(stages: int | None) -> None:
    """The fast ones alone have not the memory."""
    nodes = tuple(CostedNode(name=f"n{i}", forward_s=1.0, memory_bytes=1.0) for i in range(30))
    edges = tuple(CostedEdge(source=f"n{i}", target=f"n{i + 1}") for i in range(29))
    classes = tuple(
        DeviceClass(name=name, kind=name, devices_per_host=64, memory_bytes=memory, speed=speed)
        for name, speed, memory in (("a", 1.0, 4.0), ("b", 2.0, 2.0), ("c", 4.0, 2.0), ("d", 8.0, 2.0))
    )
    hints = Hints(pins={"n3": "rank:1", "n20": "rank:3"}, stages=stages)
    problem = hinted_problem(CostedGraph(nodes=nodes, edges=edges), Cluster(classes=classes), hints)
    rules = Rules(micro_batches=4, max_replicas=1, num_stages=stages, least=problem.least)
    plan = plan_pipeline(problem.searched, problem.cluster, rules=rules, objective="bottleneck")
    of_pinned = {name: stage.device_class for stage in plan.stages for name in stage.nodes if name in hints.pins}
    assert of_pinned == {"n3": "a, rank:1", "n20": "a, rank:3"}
    assert sum(stage.device_class == "a" for stage in plan.stages) >= 2  # ranks 0 and 2
    assert stages in (None, len(plan.stages)) and plan.bound <= plan.value


def test_data_may_flow_back_where_hints_ask_for_it() -> None:
    graph = named("embed", "a", "b", "head")
    result = best_plan(graph, devices(2), 4, hints=Hints(together=[["embed", "head"]], stages=2))
    stage_of = {name: number for number, stage in enumerate(result.best.stages) for name in stage.nodes}
    assert stage_of["embed"] == stage_of["head"]
    tasks = result.best.simulation.schedule.tasks
    assert {task.level for task in tasks} == {0, 1, 2}  # embed; a, b; head
    assert result.best.step_s >= result.bound and result.bound == pytest.approx(4 * 6.0)
    assert result.best.link_bytes == {(0, 1): 8.0, (1, 0): 8.0}


def test_remat_is_what_is_asked_for() -> None:
    graph = chain(options=(AGAIN,))
    best = best_plan(graph, devices(2), 4, hints=Hints(remat=["blocks.[01]"])).best
    assert best.plan.remat == ("blocks.[01]",)
    assert [name for stage in best.stages for name in stage.remat] == ["blocks.0", "blocks.1"]
    assert sum(stage.backward_s for stage in best.stages) == pytest.approx(0.02 * 2 + 0.03 * 2)
    with pytest.raises(PlanError, match="remat=False"):
        best_plan(graph, devices(2, memory=60e6), 8, hints=Hints(remat=False))


def test_the_error_names_the_hints_that_are_in_the_way() -> None:
    hints = Hints(pins={"blocks.*": "rank:1"}, max_memory="80MB", stages=2)
    with pytest.raises(PlanError) as caught:
        best_plan(chain(), devices(2), 8, hints=hints)
    assert caught.value.what == "no plan keeps all 3 hints."
    assert caught.value.why == "there is a plan without 'blocks.*' pinned to rank:1."
    with pytest.raises(PlanError) as caught:
        best_plan(chain(), devices(2), 8, hints=Hints(max_memory="10MB"))
    assert "no plan keeps the hint max_memory='10MB'" in caught.value.what
    assert "max_memory='74.7 MiB'" in caught.value.hint


@pytest.mark.parametrize("hints", [Hints(), Hints(max_memory="1GB")])
def test_more_ranks_than_stages_is_no_hint_of_the_user(hints: Hints) -> None:
    """Some of the model's units stay together; a hint that is not in the way is not named."""
    graph = named("embed", "a", "b")
    graph = replace(graph, nodes=(graph.nodes[0], *(replace(node, together="both") for node in graph.nodes[1:])))
    with pytest.raises(PlanError) as caught:
        best_plan(graph, devices(3), 4, hints=replace(hints, stages=3, are_stages_given=False))
    assert caught.value.what == "no plan was found that has a stage on each of 3 ranks."
    assert caught.value.why == (
        "the search keeps units together that use each other's results, or share tensors: it has 2 parts."
    )
    assert caught.value.hint == "farspan run -n 2"
    assert len(best_plan(graph, devices(2), 4, hints=replace(hints, stages=2)).best.stages) == 2


def test_the_plan_says_what_is_where_because_of_a_hint() -> None:
    hints = Hints(pins={"blocks.[01]": "rank:1"}, together=[["blocks.2", "blocks.3"]])
    result = best_plan(chain(), devices(2), 4, hints=hints)
    text = format_result(result)
    assert "no plan of consecutive stages that keeps the hints takes less" in text
    assert "blocks.0-blocks.1: pinned to rank:1 by 'blocks.[01]'" in text
    assert "blocks.2-blocks.3: together: 'blocks.2', 'blocks.3'" in text
    assert "blocks.1 is on rank:1, stage 0, pinned to rank:1 by 'blocks.[01]'" in explain(result, "blocks.1")
    assert "it cannot join rank:0: it may not run there" in explain(result, "blocks.1")
    free = best_plan(chain(), devices(2), 4)
    last = free.best.stages[0].nodes[0]
    assert "it cannot join rank:1: with the 1 more that must go along nothing would be left" in explain(free, last)
    assert "hint" not in str(best_plan(chain(), devices(2), 4).problem.whys)


def test_the_command_line_s_hints_win() -> None:
    script = Hints(pins={"a": "rank:0", "*": "rank:1"}, together=[["a", "b"]], max_memory="1GiB", stages=2, remat=True)
    both = Hints(pins={"*": "rank:2"}, together=[["c"]], stages=3, remat=False).over(script)
    assert list(both.pins.items()) == [("a", "rank:0"), ("*", "rank:2")]
    assert both.together == (("a", "b"), ("c",)) and both.max_memory == 2**30
    assert both.stages == 3 and both.remat is False
