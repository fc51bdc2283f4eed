"""Holds one micro-batch as data: calls produce and consume values, and lie in segments. Imports no torch."""

from farspan.graph.backward import Backward as Backward
from farspan.graph.backward import BackwardSegment as BackwardSegment
from farspan.graph.backward import Changes as Changes
from farspan.graph.backward import Edge as Edge
from farspan.graph.backward import RequestedGradients as RequestedGradients
from farspan.graph.backward import Stops as Stops
from farspan.graph.call import EVERYWHERE as EVERYWHERE
from farspan.graph.call import Call as Call
from farspan.graph.call import MicroBatch as MicroBatch
from farspan.graph.call import ModuleTarget as ModuleTarget
from farspan.graph.call import Segment as Segment
from farspan.graph.call import Template as Template
from farspan.graph.call import Value as Value
from farspan.graph.call import plain_of as plain_of
from farspan.graph.cut import Cut as Cut
from farspan.graph.gradient import differentiated as differentiated
from farspan.graph.gradient import earliest_uses as earliest_uses
from farspan.graph.gradient import first_released as first_released
from farspan.graph.gradient import hooked_calls as hooked_calls
from farspan.graph.gradient import parameters_of as parameters_of
from farspan.graph.gradient import passed as passed
from farspan.graph.gradient import passed_from as passed_from
from farspan.graph.gradient import released_error as released_error
from farspan.graph.gradient import route as route
from farspan.graph.graph import OUTPUT_BITS as OUTPUT_BITS
from farspan.graph.graph import Graph as Graph
from farspan.graph.graph import release as release
from farspan.graph.meta import Meta as Meta
from farspan.graph.slice_name import SliceName as SliceName
from farspan.graph.slice_name import whole_name as whole_name

__all__ = [
    "EVERYWHERE",
    "OUTPUT_BITS",
    "Backward",
    "Call",
    "Changes",
    "Cut",
    "Edge",
    "Graph",
    "Meta",
    "MicroBatch",
    "BackwardSegment",
    "Segment",
    "SliceName",
    "Stops",
    "ModuleTarget",
    "Template",
    "Value",
    "RequestedGradients",
    "release",
    "passed",
    "passed_from",
    "released_error",
    "earliest_uses",
    "hooked_calls",
    "first_released",
    "differentiated",
    "parameters_of",
    "plain_of",
    "route",
    "whole_name",
]
