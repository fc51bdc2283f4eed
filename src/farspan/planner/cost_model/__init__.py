"""Graphs with costs: the values, their JSON form, and what a search makes of them."""

from __future__ import annotations

from farspan.planner.cost_model.colocation import strongly_connected
from farspan.planner.cost_model.costed_graph import (
    WHOLE_MODEL,
    CostedEdge,
    CostedGraph,
    CostedNode,
    NodeOption,
    Seconds,
)
from farspan.planner.cost_model.graph_document import read_graph, write_graph

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
