"""Cutting a micro-batch into segments, and the way its gradients take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farspan.graph import Backward, Call, Graph, Meta, Value, route

META = Meta((2, 3), (3, 1), torch.float32, "cpu", True)


def add(graph: Graph, stage: int, *inputs: Value, name: str = "call") -> Value:
    """Record a call on `stage` whose one output depends on all inputs."""
    numbers = tuple(range(len(inputs)))
    entry = SimpleNamespace(
        name=name, depends_on=(numbers,), differentiable=numbers, unused=set[int](), requires_grad=True
    )
    call = Call(target=name, template=None, arguments=list(inputs), entry=entry, stage=stage, modes=(), where=None)
    graph.add(call, list(inputs))
    call.outputs = (Value(META, stage, call=call),)
    return call.outputs[0]


def shape(graph: Graph) -> list[tuple[int, int, int]]:
    """(level, stage, number of calls) of every segment."""
    return [(segment.level, segment.stage, len(segment.calls)) for segment in graph.segments]


def test_a_chain_of_two_stages_is_two_segments() -> None:
    graph = Graph(0)
    x = add(graph, 0)
    for stage in (0, 0, 1, 1):
        x = add(graph, stage, x)
    assert shape(graph) == [(0, 0, 3), (1, 1, 2)]


def test_a_u_shape_gives_the_first_stage_two_segments() -> None:
    graph = Graph(0)
    x = add(graph, 0)
    y = add(graph, 1, x)
    add(graph, 0, y, x)
    assert shape(graph) == [(0, 0, 1), (1, 1, 1), (2, 0, 1)]
    assert list(graph.segments[2].inputs) == [y, x], "the skip comes over the border of its own stage, too"


def test_two_calls_of_one_module_at_the_same_depth_share_a_segment() -> None:
    graph = Graph(0)
    a, b = add(graph, 0), add(graph, 0)
    add(graph, 1, add(graph, 1, a), add(graph, 1, b))
    assert shape(graph) == [(0, 0, 2), (1, 1, 3)]


def test_what_is_written_in_place_was_read_at_this_level() -> None:
    graph = Graph(0)
    x = add(graph, 0)
    y = add(graph, 1, x)
    assert graph.read_level(x, 1) == 1
    z = add(graph, 0, y)
    add(graph, 0, z, x)
    add(graph, 0, x)
    assert graph.read_level(x, 0) == 2, "the deepest use counts, not the latest"
    assert graph.read_level(x, 1) == 1
    assert graph.read_level(z, 1) == 0, "nobody there has read it"
    add(graph, 1, z, x)
    graph.calls[-1].entry.unused.add(1)
    assert graph.read_level(x, 1) == 1, "what only passes by is not read"
    graph.clear()
    assert graph.read_level(x, 0) == 0, "another cut has other levels"


def edges(graph: Graph, root: Value) -> dict[Any, list[tuple[int, int]]]:
    """For every value whose gradient crosses a border: (from segment, to segment), in order."""
    parts = route(Backward(graph, [root], [None], retain_graph=False, where=None), home_stages=[0])
    found: dict[Any, list[tuple[int, int]]] = {}
    for part in parts:
        for edge in part.outgoing:
            assert edge.src.segment is not None
            to = -1 if edge.dst.segment is None else edge.dst.segment.index
            found.setdefault(edge.key, []).append((edge.src.segment.index, to))
    return found


def test_the_gradient_of_a_value_used_thrice_passes_from_user_to_user() -> None:
    graph = Graph(0)
    memory = add(graph, 0)
    x = add(graph, 1, memory)
    x = add(graph, 2, x, memory)
    x = add(graph, 3, x, memory)
    found = edges(graph, x)
    assert found[memory] == [(3, 2), (2, 1), (1, 0)], "the latest user first, and one sum arrives at the producer"


def test_a_stage_that_uses_a_value_again_after_another_has_a_segment_for_that() -> None:
    graph = Graph(0)
    memory = add(graph, 0)
    y = add(graph, 1, memory)
    penalty = add(graph, 0, memory)
    total = add(graph, 1, y, penalty)
    assert shape(graph) == [(0, 0, 1), (1, 1, 1), (1, 0, 1), (2, 1, 1)]
    assert edges(graph, total)[memory] == [(2, 1), (1, 0)], "as one process adds up: the latest use first"


def test_what_passes_no_gradient_on_makes_no_segment() -> None:
    graph = Graph(0)
    memory = add(graph, 0)
    add(graph, 1, memory)
    entry = SimpleNamespace(name="detach", depends_on=((),), differentiable=(), requires_grad=False)
    call = Call(target="", template=None, arguments=[memory], entry=entry, stage=0, modes=(), where=None)
    graph.add(call, [memory])
    assert shape(graph) == [(0, 0, 2), (1, 1, 1)]


def test_what_the_loss_does_not_need_gets_no_gradient() -> None:
    graph = Graph(0)
    x = add(graph, 0)
    used, unused = add(graph, 1, x), add(graph, 2, x)
    found = edges(graph, used)
    assert list(found) == [x] and unused not in found
    assert found[x] == [(1, 0)]


def test_a_parameter_of_another_stage_sends_its_gradient_home() -> None:
    graph = Graph(0)
    weight = Value(META, 0, name="embed.weight")
    x = add(graph, 0)
    y = add(graph, 1, x, weight)
    found = edges(graph, y)
    assert found["embed.weight"] == [(1, -1)]


def test_backward_twice_is_refused() -> None:
    graph = Graph(0)
    root = add(graph, 0)
    assert root.call is not None
    root.call.arguments = None
    with pytest.raises(RuntimeError, match="a second time"):
        edges(graph, root)


def test_what_only_a_backward_takes_is_dropped_where_it_has_no_history() -> None:
    graph = Graph(0)
    value = add(graph, 0)
    value.data = torch.ones(2, 3, requires_grad=True)
    assert not value.drop_if_over() and value.data is not None  # what remat follows
    value.num_readers = 1
    assert value.drop_if_over() and value.data is not None
    value.num_readers, value.data = 0, torch.ones(2, 3)
    assert value.drop_if_over() and value.data is None
