"""A costed graph as JSON (docs/planner-graph.md), read strictly: every mistake is named by its key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from farspan.documents import check_keys, parse_json, read_text
from farspan.errors import PlanError
from farspan.planner.costed.graph import MORE_COSTS, CostedEdge, CostedGraph, CostedNode, NodeOption, Seconds

__all__ = ["FORMAT", "parse_graph", "read_graph", "write_graph"]

FORMAT = "farspan-graph/1"
_COSTS = ("forward_s", "backward_s", "parameter_bytes", "saved_bytes", "memory_bytes")
_NODE_KEYS = (
    "name",
    *_COSTS,
    *MORE_COSTS,
    "weight_s",
    "shared_bytes",
    "devices",
    "together",
    "is_backward",
    "options",
)
_OPTION_KEYS = ("name", "tensor_parallel", *_COSTS, "border_bytes")
_EDGE_FLAGS = ("is_saved", "is_saved_there", "is_parameter")
_EDGE_KEYS = ("source", "target", "bytes", "seconds", "value", "gradient_bytes", *_EDGE_FLAGS)


def read_graph(path: str | Path) -> CostedGraph:
    """Read a costed graph from a JSON file.

    Raises:
        PlanError: There is no such file, it is no JSON, or it does not describe a graph.
    """
    return parse_graph(read_text(path, hint="--graph graph.json"), source=str(path))


def parse_graph(text: str, *, source: str = "graph.json") -> CostedGraph:
    """The graph that a JSON text describes.

    >>> parse_graph('{"format": "farspan-graph/1", "nodes": [{"name": "a", "forward_s": 1}]}').nodes[0].forward_s
    1.0
    """
    members = _object(parse_json(text, source), ("format", "nodes", "edges"), source)
    if members.get("format") != FORMAT:
        raise PlanError(
            f'{source}: "format" is {members.get("format")!r}.',
            why=f"this version of farspan reads {FORMAT!r} only.",
            hint=f'"format": "{FORMAT}"',
        )
    nodes = [_node(entry, f"{source}: nodes[{i}]") for i, entry in enumerate(_array(members, "nodes", source))]
    edges = [_edge(entry, f"{source}: edges[{i}]") for i, entry in enumerate(_array(members, "edges", source))]
    return CostedGraph(nodes=tuple(nodes), edges=tuple(edges), source=source)


def write_graph(graph: CostedGraph) -> str:
    """The graph as JSON text, a node or an edge a line; what is as by default is left out."""
    nodes = [json.dumps(_node_members(node)) for node in graph.nodes]
    edges = [json.dumps(_edge_members(edge)) for edge in graph.edges]
    parts = [f'  "format": "{FORMAT}"']
    parts += [
        f'  "{key}": [\n    ' + ",\n    ".join(lines) + "\n  ]"
        for key, lines in (("nodes", nodes), ("edges", edges))
        if lines
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _node(entry: Any, where: str) -> CostedNode:
    members = _object(entry, _NODE_KEYS, where)
    name = _word(members, "name", where)
    where = f'{where} "{name}"'
    devices = members.get("devices")
    if devices is not None:
        devices = tuple(_checked_word(each, "devices", where) for each in _array(members, "devices", where))
    return CostedNode(
        name=name,
        devices=devices,
        together=None if members.get("together") is None else _word(members, "together", where),
        is_backward=_flag(members, "is_backward", where),
        options=tuple(_option(each, where) for each in _array(members, "options", where)),
        weight_s=_seconds(members, "weight_s", where),
        shared_bytes=_sizes(members, "shared_bytes", where),
        **{key: _number(members.get(key, 0.0), key, where) for key in MORE_COSTS},
        **_costs(members, where),
    )


def _option(entry: Any, where: str) -> NodeOption:
    members = _object(entry, _OPTION_KEYS, f"{where}: options")
    name = _word(members, "name", f"{where}: options")
    degree = members.get("tensor_parallel", 1)
    if isinstance(degree, bool) or not isinstance(degree, int):
        raise PlanError(
            f'{where}: option "{name}": tensor_parallel is {degree!r}.', why="it is a whole number from 1.", hint="2"
        )
    return NodeOption(
        name=name,
        tensor_parallel=degree,
        border_bytes=_sizes(members, "border_bytes", f'{where}: option "{name}"'),
        **_costs(members, where),
    )


def _edge(entry: Any, where: str) -> CostedEdge:
    members = _object(entry, _EDGE_KEYS, where)
    gradient = members.get("gradient_bytes")
    return CostedEdge(
        source=_word(members, "source", where),
        target=_word(members, "target", where),
        size_bytes=_number(members.get("bytes", 0.0), "bytes", where),
        time_s=_number(members.get("seconds", 0.0), "seconds", where),
        value=_word(members, "value", where) if "value" in members else "",
        gradient_bytes=None if gradient is None else _number(gradient, "gradient_bytes", where),
        **{key: _flag(members, key, where) for key in _EDGE_FLAGS},
    )


def _costs(members: Mapping[str, Any], where: str) -> dict[str, Any]:
    costs: dict[str, Any] = {}
    for key in _COSTS:
        is_seconds = key.endswith("_s")
        costs[key] = _seconds(members, key, where) if is_seconds else _number(members.get(key, 0.0), key, where)
    return costs


def _seconds(members: Mapping[str, Any], key: str, where: str) -> Seconds:
    given = members.get(key, 0.0)
    if not isinstance(given, dict):
        return _number(given, key, where)
    by_kind = cast("dict[str, Any]", given)
    return {kind: _number(value, f"{key} of {kind}", where) for kind, value in by_kind.items()}


def _sizes(members: Mapping[str, Any], key: str, where: str) -> dict[str, float]:
    return {
        word: _number(value, key, where) for word, value in _mapping(members.get(key, {}), f"{where}: {key}").items()
    }


def _number(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PlanError(f"{where}: {key} is {value!r}.", why="it is a number.", hint=f'"{key}": 0.001')
    return float(value)


def _flag(members: Mapping[str, Any], key: str, where: str) -> bool:
    value = members.get(key, False)
    if not isinstance(value, bool):
        raise PlanError(f"{where}: {key} is {value!r}.", why="it is true or false.", hint="true")
    return value


def _word(members: Mapping[str, Any], key: str, where: str) -> str:
    if key not in members:
        raise PlanError(f'{where}: the key "{key}" is missing.', why="it is needed.", hint=f'"{key}": "..."')
    return _checked_word(members[key], key, where)


def _checked_word(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise PlanError(f"{where}: {key} is {value!r}.", why="it is a word.", hint=f'"{key}": "..."')
    return value


def _array(members: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = members.get(key, [])
    if not isinstance(value, list):
        raise PlanError(f"{where}: {key} is {value!r}.", why="it is an array.", hint=f'"{key}": [...]')
    return cast("list[Any]", value)


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"{where} is {value!r}.", why="it is an object.", hint="{...}")
    return cast("dict[str, Any]", value)


def _object(value: Any, known: Sequence[str], where: str) -> dict[str, Any]:
    members = _mapping(value, where)
    check_keys(members, known, where)
    return members


def _node_members(node: CostedNode) -> dict[str, Any]:
    members: dict[str, Any] = {"name": node.name, **_cost_members(node)}
    if node.weight_s:
        members["weight_s"] = dict(node.weight_s) if isinstance(node.weight_s, Mapping) else node.weight_s
    members |= {key: getattr(node, key) for key in MORE_COSTS if getattr(node, key)}
    if node.shared_bytes:
        members["shared_bytes"] = dict(node.shared_bytes)
    if node.devices is not None:
        members["devices"] = list(node.devices)
    if node.together is not None:
        members["together"] = node.together
    if node.is_backward:
        members["is_backward"] = True
    if node.options:
        members["options"] = [_option_members(option) for option in node.options]
    return members


def _option_members(option: NodeOption) -> dict[str, Any]:
    members: dict[str, Any] = {"name": option.name, **_cost_members(option)}
    if option.tensor_parallel != 1:
        members["tensor_parallel"] = option.tensor_parallel
    if option.border_bytes:
        members["border_bytes"] = dict(option.border_bytes)
    return members


def _cost_members(owner: CostedNode | NodeOption) -> dict[str, Any]:
    values: dict[str, Seconds] = {key: getattr(owner, key) for key in _COSTS}
    return {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items() if value}


def _edge_members(edge: CostedEdge) -> dict[str, Any]:
    members: dict[str, Any] = {"source": edge.source, "target": edge.target}
    optional = {"bytes": edge.size_bytes, "seconds": edge.time_s, "value": edge.value}
    optional |= {key: getattr(edge, key) for key in _EDGE_FLAGS}
    members |= {key: value for key, value in optional.items() if value}
    return members if edge.gradient_bytes is None else members | {"gradient_bytes": edge.gradient_bytes}
