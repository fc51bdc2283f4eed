"""Graphs with costs: the values, their JSON form, and what a search makes of them."""

from __future__ import annotations

from farspan.planner.cost_model.document import read_graph, write_graph
from farspan.planner.cost_model.graph import WHOLE_MODEL, CostedEdge, CostedGraph, CostedNode, NodeOption, Seconds
from farspan.planner.cost_model.groups import strongly_connected

__all__ = [
    "WHOLE_MODEL",
    "CostedEdge",
    "CostedGraph",
    "CostedNode",
    "NodeOption",
    "Seconds",
    "read_graph",
    "strongly_connected",
    "write_graph",
]
