"""A costed graph as JSON (docs/planner-graph.md), read strictly: every mistake is named by its key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farspan.documents import as_count, as_flag, as_list, as_name, as_number, as_object, parse_json, read_text
from farspan.errors import PlanError, quoted
from farspan.planner.cost_model.costed_graph import MORE_COSTS, CostedEdge, CostedGraph, CostedNode, NodeOption, Seconds

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
    """Returns the graph that a JSON text describes.

    >>> parse_graph('{"format": "farspan-graph/1", "nodes": [{"name": "a", "forward_s": 1}]}').nodes[0].forward_s
    1.0
    """
    members = as_object(parse_json(text, source), source, known=("format", "nodes", "edges"))
    if members.get("format") != FORMAT:
        raise PlanError(
            f'{source}: "format" is {quoted(members.get("format"))}.',
            why=f"this version of farspan reads {FORMAT!r} only.",
            hint=f'"format": "{FORMAT}"',
        )
    nodes = [_node(entry, f"{source}: nodes[{i}]") for i, entry in enumerate(_array(members, "nodes", source))]
    edges = [_edge(entry, f"{source}: edges[{i}]") for i, entry in enumerate(_array(members, "edges", source))]
    _check_borders(nodes, source)
    return CostedGraph(nodes=tuple(nodes), edges=tuple(edges), source=source)


def write_graph(graph: CostedGraph) -> str:
    """Returns the graph as JSON text, a node or an edge a line; what is as by default is left out."""
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
    members = as_object(entry, where, known=_NODE_KEYS, needed=("name",))
    name = as_name(members["name"], f"{where}: name")
    where = f'{where} "{name}"'
    devices = members.get("devices")
    if devices is not None:
        devices = tuple(as_name(each, f"{where}: devices") for each in as_list(devices, f"{where}: devices"))
    together = members.get("together")
    return CostedNode(
        name=name,
        devices=devices,
        together=None if together is None else as_name(together, f"{where}: together"),
        is_backward=as_flag(members.get("is_backward", False), f"{where}: is_backward"),
        options=tuple(_option(each, f"{where}: options") for each in _array(members, "options", where)),
        weight_s=_seconds(members, "weight_s", where),
        shared_bytes=_sizes(members, "shared_bytes", where),
        **{key: _cost(members, key, where) for key in MORE_COSTS},
        **_costs(members, where),
    )


def _option(entry: Any, where: str) -> NodeOption:
    members = as_object(entry, where, known=_OPTION_KEYS, needed=("name",))
    name = as_name(members["name"], f"{where}: name")
    where = f'{where} "{name}"'
    return NodeOption(
        name=name,
        tensor_parallel=as_count(members.get("tensor_parallel", 1), f"{where}: tensor_parallel", least=1),
        border_bytes=_sizes(members, "border_bytes", where),
        **_costs(members, where),
    )


def _edge(entry: Any, where: str) -> CostedEdge:
    members = as_object(entry, where, known=_EDGE_KEYS, needed=("source", "target"))
    return CostedEdge(
        source=as_name(members["source"], f"{where}: source"),
        target=as_name(members["target"], f"{where}: target"),
        size_bytes=_cost(members, "bytes", where),
        time_s=_cost(members, "seconds", where),
        value=as_name(members["value"], f"{where}: value") if "value" in members else "",
        gradient_bytes=None if members.get("gradient_bytes") is None else _cost(members, "gradient_bytes", where),
        **{key: as_flag(members.get(key, False), f"{where}: {key}") for key in _EDGE_FLAGS},
    )


def _check_borders(nodes: Sequence[CostedNode], source: str) -> None:
    names = {node.name for node in nodes}
    for node in nodes:
        for name in (name for option in node.options for name in option.border_bytes):
            if name not in names:
                where = f'{source}: node "{node.name}": border_bytes of an option'
                raise PlanError(f"{where} end nowhere.", why=f'there is no node "{name}".', hint="name a node")


def _costs(members: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {key: (_seconds if key.endswith("_s") else _cost)(members, key, where) for key in _COSTS}


def _cost(members: Mapping[str, Any], key: str, where: str) -> float:
    return as_number(members.get(key, 0.0), f"{where}: {key}")


def _seconds(members: Mapping[str, Any], key: str, where: str) -> Seconds:
    return _sizes(members, key, where) if isinstance(members.get(key), dict) else _cost(members, key, where)


def _sizes(members: Mapping[str, Any], key: str, where: str) -> dict[str, float]:
    """Returns numbers by name."""
    where, sizes = f"{where}: {key}", dict[str, float]()
    for name, value in as_object(members.get(key, {}), where).items():
        sizes[as_name(name, f"{where}: a name")] = as_number(value, f'{where} of "{name}"')
    return sizes


def _array(members: Mapping[str, Any], key: str, where: str) -> list[Any]:
    return as_list(members.get(key, []), f"{where}: {key}")


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
