"""The JSON form of a graph with costs: nothing is lost, and every mistake is named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planner.placement.brute_force import graphs

from farspan.errors import PlanError
from farspan.planner.costed import CostedEdge, CostedGraph, CostedNode
from farspan.planner.costed.document import parse_graph, write_graph

NODE = {"name": "a", "forward_s": 1.0}


def parse(**changes: object) -> CostedGraph:
    members: dict[str, object] = {"format": "farspan-graph/1", "nodes": [NODE, {"name": "b"}], "edges": []}
    return parse_graph(json.dumps(members | changes))


@given(st.one_of(graphs(max_nodes=5, options=True), graphs(max_nodes=5, training=True)))
def test_what_is_written_is_read(graph: CostedGraph) -> None:
    again = parse_graph(write_graph(graph))
    assert again.nodes == graph.nodes and again.edges == graph.edges


def test_seconds_by_kind_and_values_are_read() -> None:
    graph = parse(
        nodes=[{"name": "a", "forward_s": {"A100": 1, "cpu": 20}}, {"name": "b"}],
        edges=[{"source": "a", "target": "b", "bytes": 5, "value": "second"}],
    )
    assert graph.nodes[0].forward_s == {"A100": 1.0, "cpu": 20.0}
    assert graph.edges == (CostedEdge(source="a", target="b", size_bytes=5.0, value="second"),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other/1"}, '"format" is'),
        ({"nodess": []}, 'unknown key "nodess"'),
        ({"nodes": []}, "has no nodes"),
        ({"nodes": [{"forward_s": 1}]}, '"name" is missing'),
        ({"nodes": [NODE, NODE]}, "two nodes are called"),
        ({"nodes": [{"name": "a", "forwards": 1}]}, 'unknown key "forwards"'),
        ({"nodes": [{"name": "a", "forward_s": -1}]}, "forward_s is -1"),
        ({"nodes": [{"name": "a", "forward_s": "1"}]}, "forward_s is '1'"),
        ({"nodes": [{"name": "a", "memory_bytes": True}]}, "memory_bytes is True"),
        ({"nodes": [{"name": "a", "devices": []}]}, "may run nowhere"),
        ({"nodes": [{"name": "a", "options": [{"name": "x", "tensor_parallel": 0}]}]}, "cannot be"),
        ({"edges": [{"source": "a", "target": "z"}]}, "ends nowhere"),
        ({"edges": [{"source": "a", "target": "a"}]}, "begins where it ends"),
        ({"edges": [{"source": "a", "target": "b"}, {"source": "b", "target": "a"}]}, "circle"),
        ({"edges": [{"source": "a", "target": "b"}, {"source": "a", "target": "b"}]}, "there twice"),
        (
            {
                "nodes": [NODE, {"name": "b"}, {"name": "c"}],
                "edges": [{"source": "a", "target": "b", "bytes": 1}, {"source": "a", "target": "c", "bytes": 2}],
            },
            "costs something else",
        ),
    ],
)
def test_a_mistake_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse(**changes)
    assert message in caught.value.what and caught.value.why and caught.value.hint


def test_no_json_and_no_file_are_errors(tmp_path) -> None:
    from farspan.planner import read_graph

    with pytest.raises(PlanError, match="line 1"):
        parse_graph("{")
    with pytest.raises(PlanError, match="cannot be read"):
        read_graph(tmp_path / "none.json")


def test_a_cost_that_is_no_number_is_refused_in_python_too() -> None:
    with pytest.raises(PlanError, match="is nan"):
        CostedGraph(nodes=(CostedNode(name="a", forward_s=float("nan")),))
