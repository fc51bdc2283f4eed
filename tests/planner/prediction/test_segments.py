"""What passes between the segments of stages, and what is there within one, on graphs of few nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode
from farspan.planner.prediction.parts import Stages
from farspan.planner.prediction.segments import Hop, Segment, make_segments


def segments_of(edges: list[CostedEdge], **stage_of: int) -> list[Segment]:
    nodes = {name: CostedNode(name=name, forward_s=1.0) for name in stage_of}
    graph = CostedGraph(nodes=tuple(nodes.values()), edges=tuple(edges))
    stages = [[nodes[name] for name in stage_of if stage_of[name] == stage] for stage in sorted({*stage_of.values()})]
    return make_segments(graph, stages)


def test_a_value_is_sent_once_to_the_first_segment_of_a_stage_that_uses_it() -> None:
    edges = [
        CostedEdge(source="a", target="b", size_bytes=10.0),
        CostedEdge(source="a", target="d", size_bytes=10.0),
        CostedEdge(source="b", target="c", size_bytes=1.0),
        CostedEdge(source="c", target="d", size_bytes=2.0),
    ]
    segments = segments_of(edges, a=0, b=1, c=0, d=1)
    assert [[node.name for node in each.nodes] for each in segments] == [["a"], ["b"], ["c"], ["d"]]
    assert [[hop.node for hop in each.received] for each in segments] == [[], ["a"], ["b"], ["c"]]
    assert [[(hop.node, hop.source) for hop in each.returned] for each in segments] == [
        [("a", 1)],
        [("a", 3), ("b", 2)],
        [("c", 3)],
        [],
    ]


@pytest.mark.parametrize(("is_saved_there", "passed"), [(False, [0.0, 10.0, 10.0, 0.0]), (True, [0.0, 10.0, 0.0, 0.0])])
def test_what_is_passed_within_a_stage_is_there_until_its_last_use_or_until_who_uses_it_keeps_it(
    is_saved_there: bool, passed: list[float]
) -> None:
    edges = [
        CostedEdge(source="a", target="b", size_bytes=10.0),
        CostedEdge(source="a", target="c", size_bytes=10.0, is_saved_there=is_saved_there),
    ]
    (segment,) = segments_of(edges, a=0, b=0, c=0, d=0)
    assert segment.passed_bytes == passed


@pytest.mark.parametrize("is_of_another_rank", [True, False])
def test_a_backward_whose_gradient_goes_to_a_segment_without_one_feeds_that_rank(is_of_another_rank: bool) -> None:
    first, second = Segment(level=0, stage=0), Segment(level=1, stage=1, has_backward=True)
    first.returned.append(Hop(source=1, target=0, sent_bytes=1.0, held_bytes=1.0, node="tied"))
    part = SimpleNamespace(width=1, device=None)
    stages: Any = SimpleNamespace(
        segments=[first, second],
        ranks=[0, int(is_of_another_rank)],
        parts=[part, part],
        _backwards=[1],
        _costs=[None, SimpleNamespace(weight_flops=0.0)],
    )
    (backward,) = Stages._work(stages, 0.0).backwards
    assert backward.feeds_another_rank is is_of_another_rank
