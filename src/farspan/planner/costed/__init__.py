"""Graphs with costs: the values, their JSON form, and what a search makes of them."""

from __future__ import annotations

from farspan.planner.costed.document import read_graph, write_graph
from farspan.planner.costed.graph import WHOLE_MODEL, CostedEdge, CostedGraph, CostedNode, NodeOption, Seconds
from farspan.planner.costed.problem import strongly_connected

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
