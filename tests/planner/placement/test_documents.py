"""The JSON form of a graph with costs: nothing is lost, and every mistake is named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.documents.edits import edited, try_to_read
from tests.planner.placement.brute_force import graphs

from farspan.errors import PlanError
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode
from farspan.planner.cost_model.graph_document import parse_graph, write_graph

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
        ({"nodes": [{"name": "a", "devices": ["A100", ""]}]}, "devices is ''"),
        ({"nodes": [{"name": " "}]}, "name is ' '"),
        ({"nodes": [{"name": "a", "forward_s": 1e30}]}, "forward_s is 1e+30"),
        ({"nodes": [{"name": "a", "forward_s": 10**30}]}, "forward_s is 1000"),
        ({"nodes": [{"name": "a", "forward_s": {"": 1}}]}, "a name is ''"),
        ({"nodes": [{"name": "a", "forward_s": {"cpu": None}}]}, 'forward_s of "cpu" is None'),
        ({"nodes": [{"name": "a", "options": [{"name": "x", "border_bytes": {"z": 1}}]}]}, "end nowhere"),
        ({"nodes": [{"name": "a", "options": [{"name": "x", "tensor_parallel": 2.0}]}]}, "tensor_parallel is 2.0"),
        ({"nodes": {"name": "a"}}, "nodes is {'name': 'a'}"),
        ({"nodes": [["a"]]}, "nodes[0] is ['a']"),
        ({"edges": None}, "edges is None"),
        ({"edges": [{"source": "a", "target": "b", "is_saved": 1}]}, "is_saved is 1"),
        ({"nodes": [{"name": "a", "options": [{"name": "x", "tensor_parallel": 0}]}]}, "tensor_parallel is 0"),
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
        (
            {
                "nodes": [NODE, {"name": "b"}, {"name": "c"}],
                "edges": [{"source": "a", "target": "b", "is_parameter": True}, {"source": "a", "target": "c"}],
            },
            "not a parameter, unlike",
        ),
        (
            {
                "nodes": [NODE, {"name": "b"}, {"name": "c"}],
                "edges": [{"source": "a", "target": "b", "gradient_bytes": 0}, {"source": "a", "target": "c"}],
            },
            "not without gradient, unlike",
        ),
        ({"nodes": [{"name": "a", "saved_bytes": 1, "shared_bytes": {"x": 2}}]}, "shares 2 bytes of the 1"),
    ],
)
def test_a_mistake_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse(**changes)
    assert message in caught.value.what and caught.value.why and caught.value.hint


SMALL = write_graph(
    CostedGraph(
        nodes=(CostedNode(name="a", forward_s={"cpu": 1.0}, memory_bytes=5.0, together="w"), CostedNode(name="b")),
        edges=(CostedEdge(source="a", target="b", size_bytes=5.0, value="x", is_saved=True),),
    )
)


@given(edited(SMALL))
@settings(derandomize=True, max_examples=200)
def test_no_edit_of_a_file_is_more_than_an_error(text: str) -> None:
    graph = try_to_read(parse_graph, text)
    if graph is not None:
        again = parse_graph(write_graph(graph))
        assert (again.nodes, again.edges) == (graph.nodes, graph.edges)


def test_no_json_and_no_file_are_errors(tmp_path) -> None:
    from farspan.planner import read_graph

    with pytest.raises(PlanError, match="line 1"):
        parse_graph("{")
    with pytest.raises(PlanError, match="cannot be read"):
        read_graph(tmp_path / "none.json")


def test_a_cost_that_is_no_number_is_refused_in_python_too() -> None:
    with pytest.raises(PlanError, match="is nan"):
        CostedGraph(nodes=(CostedNode(name="a", forward_s=float("nan")),))
    with pytest.raises(PlanError, match=r"is 1e\+30"):
        CostedGraph(nodes=(CostedNode(name="a", forward_s=1e30),))
    with pytest.raises(PlanError, match="has no name"):
        CostedGraph(nodes=(CostedNode(name=" "),))
