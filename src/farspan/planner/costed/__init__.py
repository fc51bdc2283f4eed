"""Graphs with costs: the values, their JSON form, and what a search makes of them."""

from __future__ import annotations

from farspan.planner.costed.document import read_graph, write_graph
from farspan.planner.costed.graph import CostedEdge, CostedGraph, CostedNode, NodeOption

__all__ = ["CostedEdge", "CostedGraph", "CostedNode", "NodeOption", "read_graph", "write_graph"]
