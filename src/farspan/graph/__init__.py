"""One micro-batch as data: calls produce and consume values, and lie in segments. Imports no torch."""

from farspan.graph.gradient import Edge as Edge
from farspan.graph.gradient import Part as Part
from farspan.graph.gradient import earliest_uses as earliest_uses
from farspan.graph.gradient import route as route
from farspan.graph.graph import OUTPUT_BITS as OUTPUT_BITS
from farspan.graph.graph import Backward as Backward
from farspan.graph.graph import Call as Call
from farspan.graph.graph import Graph as Graph
from farspan.graph.graph import Segment as Segment
from farspan.graph.over import let_go as let_go
from farspan.graph.stops import Stops as Stops
from farspan.graph.stops import hooked_calls as hooked_calls
from farspan.graph.value import EVERYWHERE as EVERYWHERE
from farspan.graph.value import Meta as Meta
from farspan.graph.value import Value as Value
from farspan.graph.wanted import Wanted as Wanted

__all__ = [
    "EVERYWHERE",
    "OUTPUT_BITS",
    "Backward",
    "Call",
    "Edge",
    "Graph",
    "Meta",
    "Part",
    "Segment",
    "Stops",
    "Value",
    "Wanted",
    "let_go",
    "earliest_uses",
    "hooked_calls",
    "route",
]
