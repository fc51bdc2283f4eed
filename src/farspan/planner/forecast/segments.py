"""The tasks of a step: a forward and a backward of each segment of each micro-batch.

In a row of stages each stage is one segment. Where data also flow back to an earlier stage, a stage has several, cut as
the runtime cuts them: level(node) = max over what it uses of level + (1 if that is on another stage), and nodes of one
level and stage are a segment.

    stage 0   embed             head            level 0, 2
    stage 1           blocks                    level 1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from farspan.planner.costed import CostedGraph
from farspan.planner.search.lattice import linear_order
from farspan.schedule import Kind, Task

__all__ = ["Work", "is_row", "make_tasks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a node takes of a micro-batch on its stage's device."""

    forward_s: float
    backward_s: float
    saved_bytes: float


@dataclass(slots=True)
class _Segment:
    level: int
    stage: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    saved_bytes: float = 0.0
    nodes: list[str] = field(default_factory=list[str])


def make_tasks(
    graph: CostedGraph, stages: Sequence[Mapping[str, Work]], ranks: Sequence[int], num_micro_batches: int
) -> tuple[Task, ...]:
    """Per micro-batch the forwards of all segments, then their backwards, the last segment first.

    Args:
        graph: What is run.
        stages: Of each stage its nodes, in a row as far as there is one.
        ranks: Of each stage.
        num_micro_batches: Of a step.

    Returns:
        The tasks; their memory is a share of what their stage saves of a micro-batch.
    """
    segments = _segments(graph, stages)
    passed = _passed(graph, segments)
    shares = _shares(segments, len(stages))
    sent, returned = _messages(graph, segments, ranks)
    count = len(segments)
    tasks: list[Task] = []
    for micro_batch in range(num_micro_batches):
        first = micro_batch * 2 * count

        def forward(number: int, first: int = first) -> int:
            return first + number

        def backward(number: int, first: int = first) -> int:
            return first + 2 * count - 1 - number

        for number, segment in enumerate(segments):
            tasks.append(
                Task(
                    kind=Kind.FORWARD,
                    rank=ranks[segment.stage],
                    micro_batch=micro_batch,
                    level=segment.level,
                    duration=segment.forward_s,
                    needs=tuple(sorted(forward(source) for source, target in passed if target == number)),
                    holds=True,
                    memory=shares[number],
                    output_bytes=sent[number],
                )
            )
        for number in reversed(range(count)):
            users = [backward(target) for source, target in passed if source == number]
            tasks.append(
                Task(
                    kind=Kind.BACKWARD,
                    rank=ranks[segments[number].stage],
                    micro_batch=micro_batch,
                    level=segments[number].level,
                    duration=segments[number].backward_s,
                    needs=tuple(sorted([forward(number), *users])),
                    holds=False,
                    memory=-shares[number],
                    output_bytes=returned[number],
                )
            )
    return tuple(tasks)


def is_row(graph: CostedGraph, stages: Sequence[Iterable[str]]) -> bool:
    """Whether no data flow back to an earlier stage; `stages` has the names of each one's nodes."""
    stage_of = {name: number for number, names in enumerate(stages) for name in names}
    return all(stage_of[edge.source] <= stage_of[edge.target] for edge in graph.edges)


def _segments(graph: CostedGraph, stages: Sequence[Mapping[str, Work]]) -> list[_Segment]:
    """In an order in which each comes after what it uses."""
    stage_of = {name: number for number, stage in enumerate(stages) for name in stage}
    level_of = _levels(graph, stage_of)
    found: dict[tuple[int, int], _Segment] = {}
    for stage, work in enumerate(stages):
        for name, each in work.items():
            key = (level_of[name], stage)
            segment = found.setdefault(key, _Segment(*key))
            segment.nodes.append(name)
            segment.forward_s += each.forward_s
            segment.backward_s += each.backward_s
            segment.saved_bytes += each.saved_bytes
    return [found[key] for key in sorted(found)]


def _levels(graph: CostedGraph, stage_of: Mapping[str, int]) -> dict[str, int]:
    number = {node.name: index for index, node in enumerate(graph.nodes)}
    sources: dict[str, list[str]] = {}
    for edge in graph.edges:
        sources.setdefault(edge.target, []).append(edge.source)
    levels: dict[str, int] = {}
    for index in linear_order(len(number), [(number[edge.source], number[edge.target]) for edge in graph.edges]):
        name = graph.nodes[index].name
        levels[name] = max(
            (levels[source] + (stage_of[source] != stage_of[name]) for source in sources.get(name, ())), default=0
        )
    return levels


def _passed(graph: CostedGraph, segments: Sequence[_Segment]) -> set[tuple[int, int]]:
    """Pairs of segments of which the second uses what the first makes."""
    segment_of = {name: number for number, segment in enumerate(segments) for name in segment.nodes}
    pairs = {(segment_of[edge.source], segment_of[edge.target]) for edge in graph.edges}
    return {(source, target) for source, target in pairs if source != target}


def _messages(
    graph: CostedGraph, segments: Sequence[_Segment], ranks: Sequence[int]
) -> tuple[list[tuple[tuple[int, float], ...]], list[tuple[tuple[int, float], ...]]]:
    """By segment, what it sends to which ranks: of the forward, and of the backward."""
    segment_of = {name: number for number, segment in enumerate(segments) for name in segment.nodes}
    forward: list[dict[tuple[str, str, int], float]] = [{} for _ in segments]
    backward: list[dict[tuple[str, str, int], float]] = [{} for _ in segments]
    for edge in graph.edges:
        source, target = segment_of[edge.source], segment_of[edge.target]
        home, there = ranks[segments[source].stage], ranks[segments[target].stage]
        if home != there:
            forward[source][edge.source, edge.value, there] = 0.0 if edge.is_parameter else edge.size_bytes
            backward[target][edge.source, edge.value, home] = edge.sent_back_bytes
    return [_by_rank(each) for each in forward], [_by_rank(each) for each in backward]


def _by_rank(values: Mapping[tuple[str, str, int], float]) -> tuple[tuple[int, float], ...]:
    """Each value once to each rank."""
    sizes: dict[int, float] = {}
    for (_, _, rank), size in values.items():
        sizes[rank] = sizes.get(rank, 0.0) + size
    return tuple(sorted(sizes.items()))


def _shares(segments: Sequence[_Segment], num_stages: int) -> list[float]:
    """Of what its stage saves, the share of each segment; equal shares where none saves anything."""
    total, count = [0.0] * num_stages, [0] * num_stages
    for segment in segments:
        total[segment.stage] += segment.saved_bytes
        count[segment.stage] += 1
    return [each.saved_bytes / total[each.stage] if total[each.stage] else 1.0 / count[each.stage] for each in segments]
