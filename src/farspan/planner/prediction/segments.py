"""The segments of a pipeline's stages, and what passes between them: nodes are cut as recorded calls are (`graph.cut`).

Of a chain that is cut into consecutive stages, each is one segment; where data flow back to a stage, or branches go
over its border, it has several.

    stage 0   embed             head            level 0, 2
    stage 1           blocks                    level 1

Gradients go the way they go there, from the last user of a value to the one before it:

    forward     P --v--> S1,  P --v--> S3           backward    S3 --g--> S1 --sum--> P
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from farspan.graph import Cut
from farspan.planner.cost_model import CostedEdge, CostedGraph, CostedNode, Seconds
from farspan.planner.partition_dp.lattice import linear_order

__all__ = ["Hop", "Segment", "make_segments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A value on its way from one segment to another, or its gradient on its way back.

    Attributes:
        source: Number of the segment that it comes from.
        target: Number of the segment that it goes to.
        sent_bytes: What it is on its way.
        held_bytes: What it takes where it has arrived.
        node: Name of the node that made the value.
        is_once: It goes once in a step, before the first task.
        is_dropped: Where it comes from, nothing but this message, the last of it, needs it once it has been sent.
    """

    source: int
    target: int
    sent_bytes: float
    held_bytes: float
    node: str
    is_once: bool = False
    is_dropped: bool = False


@dataclass(eq=False, slots=True)
class Segment:
    """Nodes of one stage that run one after the other.

    Attributes:
        level: One more than that of any segment of another stage whose values it uses.
        stage: Number of the stage.
        nodes: As they run there, in the order of the graph.
        index: How many segments have begun before it.
        uses: Numbers of the segments whose values it needs in each micro-batch.
        received: Values that come from other stages, each to the first segment that uses it.
        returned: Gradients that come from other segments.
        kept_bytes: By micro-batch: what stays until the backward, because of what passes between segments.
        handed_bytes: What gets no gradient, and stays when it has run only for later segments of its stage.
        taken_bytes: What earlier segments have handed to it that it saves itself.
        ended_bytes: What they have handed to it that goes when it has run.
        has_backward: Whether gradients come to it.
        has_weights: Whether parameters of its stage get a gradient from it.
        saved_bytes: The same of what autograd saves, and no segment of the stage before it.
        passed_bytes: By node, what is there in its forward because another node has made it, and for no other reason.
    """

    level: int
    stage: int
    nodes: list[CostedNode] = field(default_factory=list[CostedNode])
    index: int = 0
    uses: set[int] = field(default_factory=set[int])
    received: list[Hop] = field(default_factory=list[Hop])
    returned: list[Hop] = field(default_factory=list[Hop])
    kept_bytes: float = 0.0
    handed_bytes: float = 0.0
    taken_bytes: float = 0.0
    ended_bytes: float = 0.0
    has_backward: bool = False
    has_weights: bool = False
    saved_bytes: float = 0.0
    passed_bytes: list[float] = field(default_factory=list[float])

    @property
    def order(self) -> tuple[int, int]:
        """A total order that follows the data."""
        return (self.level, self.index)


def make_segments(graph: CostedGraph, stages: Sequence[Sequence[CostedNode]]) -> list[Segment]:
    """Cut stages into segments, in an order in which each comes after all that it uses.

    Args:
        graph: What is run.
        stages: The nodes of each as they run there, in the order of the graph; together all of it.
    """
    segments = _cut(graph, stages)
    segment_of = {node.name: number for number, segment in enumerate(segments) for node in segment.nodes}
    uses: dict[tuple[str, str], list[CostedEdge]] = {}
    for edge in graph.edges:
        uses.setdefault((edge.source, edge.value), []).append(edge)
    for segment in segments:
        segment.passed_bytes = [0.0] * len(segment.nodes)
    place_of = {node.name: place for segment in segments for place, node in enumerate(segment.nodes)}
    for edges in uses.values():
        _pass_on(segments, segment_of, edges)
        _pass_within(segments, segment_of, place_of, edges)
    _note_backwards(graph, segments, segment_of)
    _count_saved(segments)
    return segments


class _Nodes(Cut[str, Segment]):
    """Nodes in segments, each known by its name."""

    __slots__ = ("_gradients", "_segment_of")

    def __init__(self, inputs: Mapping[str, Sequence[CostedEdge]]) -> None:
        super().__init__()
        self._gradients = {
            name: [(edge.source, edge.value) for edge in edges if edge.has_gradient] for name, edges in inputs.items()
        }
        self._segment_of: dict[str, Segment] = {}

    def make_segment(self, index: int, level: int, stage: int) -> Segment:
        return Segment(level, stage, index=index)

    def segment_of(self, call: str) -> Segment:
        return self._segment_of[call]

    def receiving(self, call: str) -> Sequence[tuple[str, str]]:
        return self._gradients.get(call, ())

    def put(self, node: CostedNode, segment: Segment) -> None:
        """Append `node` to its segment."""
        segment.nodes.append(node)
        self._segment_of[node.name] = segment
        self.calls.append(node.name)


def _cut(graph: CostedGraph, stages: Sequence[Sequence[CostedNode]]) -> list[Segment]:
    """Place each node in its segment."""
    chosen = {node.name: (stage, node) for stage, nodes in enumerate(stages) for node in nodes}
    inputs: dict[str, list[CostedEdge]] = {}
    for edge in graph.edges:
        inputs.setdefault(edge.target, []).append(edge)
    cut = _Nodes(inputs)
    for name in _in_order(graph):
        stage, node = chosen[name]
        sources = [cut.segment_of(edge.source) for edge in inputs.get(name, ()) if not edge.is_parameter]
        cut.put(node, cut.segment_for(name, stage, sources))
    return sorted(cut.segments, key=lambda segment: segment.order)


def _in_order(graph: CostedGraph) -> list[str]:
    number = {node.name: index for index, node in enumerate(graph.nodes)}
    before = [(number[edge.source], number[edge.target]) for edge in graph.edges if not edge.is_parameter]
    return [graph.nodes[index].name for index in linear_order(len(number), before, depth_first=False)]


def _pass_on(segments: Sequence[Segment], segment_of: Mapping[str, int], edges: Sequence[CostedEdge]) -> None:
    """The ways of one value, and of its gradient; `edges` are all uses of it."""
    one, home = edges[0], segment_of[edges[0].source]
    there = sorted({segment_of[edge.target] for edge in edges} - {home})
    if not there:
        return
    savers = {segment_of[edge.target] for edge in edges if edge.is_saved_there}
    first_of: dict[int, int] = {segments[home].stage: home}
    for number in there:
        first_of.setdefault(segments[number].stage, number)
        if not one.is_parameter:
            segments[number].uses.add(home)
    stays = one.has_gradient or one.is_parameter or one.is_saved or home in savers
    stays = stays or any(segments[number].stage == segments[home].stage for number in there)
    arrivals = list(first_of.values())[1:]
    for number in arrivals:
        hop = Hop(
            source=home,
            target=number,
            sent_bytes=one.size_bytes,
            held_bytes=one.size_bytes,
            node=one.source,
            is_once=one.is_parameter,
            is_dropped=not stays and number == arrivals[-1],
        )
        segments[number].received.append(hop)
    for first in first_of.values():
        if first in savers or (one.is_saved and first == home):
            continue
        later = [number for number in there if number > first and segments[number].stage == segments[first].stage]
        saving = [number for number in later if number in savers]
        if one.has_gradient and not (one.is_parameter and first != home):
            segments[first].kept_bytes += one.size_bytes
            if saving:  # it is there already
                segments[saving[0]].kept_bytes -= one.size_bytes
        elif later and not one.is_parameter:
            segments[first].handed_bytes += one.size_bytes
            if saving:
                segments[saving[0]].taken_bytes += one.size_bytes
            else:
                segments[later[-1]].ended_bytes += one.size_bytes
    if one.has_gradient:
        for later, earlier in pairwise([*reversed(there), *_arrival(segments, home, there[0])]):
            hop = Hop(
                source=later,
                target=earlier,
                sent_bytes=one.sent_back_bytes,
                held_bytes=one.held_back_bytes,
                node=one.source,
            )
            segments[earlier].returned.append(hop)


def _pass_within(
    segments: Sequence[Segment],
    segment_of: Mapping[str, int],
    place_of: Mapping[str, int],
    edges: Sequence[CostedEdge],
) -> None:
    """Finds values that no segment but that of their maker uses, and that are not kept: they are there until their last
    use."""
    one, home = edges[0], segment_of[edges[0].source]
    if one.is_saved or one.is_parameter or any(segment_of[edge.target] != home for edge in edges):
        return
    savers = [place_of[edge.target] for edge in edges if edge.is_saved_there]
    end = min(savers, default=max(place_of[edge.target] for edge in edges) + 1)
    for place in range(place_of[one.source] + 1, end):
        segments[home].passed_bytes[place] += one.size_bytes


def _arrival(segments: Sequence[Segment], home: int, first_user: int) -> list[int]:
    """Returns the segment that a gradient comes to at last: that of the node that made the value. The gradient of a
    parameter that is used before its own node runs comes to a backward of its device that is yet to run, if there is
    one.
    """
    stage = segments[home].stage
    before = [number for number in range(first_user) if segments[number].stage == stage]
    return [home] if home < first_user else before[-1:]


def _note_backwards(graph: CostedGraph, segments: Sequence[Segment], segment_of: Mapping[str, int]) -> None:
    """Gradients come where something is trained, or passed on to what is: not to what stands before all of that, which
    saves nothing either.
    """
    for segment in segments:
        segment.has_weights = any(node.parameter_bytes > 0 for node in segment.nodes)
        saves = any(node.saved_bytes > 0 or _takes_time(node.backward_s) for node in segment.nodes)
        segment.has_backward = segment.has_weights or saves
    for edge in graph.edges:
        if edge.has_gradient:
            user, source = segments[segment_of[edge.target]], segments[segment_of[edge.source]]
            user.has_backward = source.has_backward = True
            user.has_weights |= edge.is_parameter and source.stage == user.stage


def _takes_time(seconds: Seconds) -> bool:
    return any(seconds.values()) if isinstance(seconds, Mapping) else seconds > 0


def _count_saved(segments: Sequence[Segment]) -> None:
    """Counts what several nodes of a stage keep for the first of them."""
    known: set[tuple[int, str]] = set()
    for segment in segments:
        for node in segment.nodes:
            segment.saved_bytes += node.saved_bytes
            for word, size in node.shared_bytes.items():
                segment.saved_bytes -= size if (segment.stage, word) in known else 0.0
                known.add((segment.stage, word))
