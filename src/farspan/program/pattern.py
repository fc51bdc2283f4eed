"""Captures all that a program depends on, as data that can be compared: steps that look alike have equal patterns.

A program that is kept for later steps is built from the pattern alone: from copies of the recorded graphs that know
nothing else. What the pattern does not hold the program cannot depend on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from farspan.graph import OUTPUT_BITS, Backward, Call, Graph, MicroBatch, ModuleTarget, RequestedGradients, Value
from farspan.program.options import Settings

__all__ = ["Pattern", "PatternStep", "pattern_of", "step_of_pattern"]

_OUTPUT = (1 << OUTPUT_BITS) - 1


class _GraphNote(NamedTuple):
    record: tuple[tuple[Any, ...], ...]
    """See `Graph.record`."""
    sources: tuple[Any, ...]
    """For each source its number in the step, or, if an earlier graph of the step makes it, (graph, call, output)."""
    backwards: tuple[tuple[Any, ...], ...]
    """For each backward: positions of its roots, whether it retains the graph, what is requested of it."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A step without its data."""

    settings: Settings
    graphs: tuple[_GraphNote, ...]
    sources: tuple[tuple[Any, ...], ...]
    """Sources that are not made in the step: metadata, stage, name, of which parameter it is the gradient."""
    leaves: tuple[tuple[Any, ...], ...]
    """What is now known of the leaves that are called, and of their parameters."""


def pattern_of(graphs: Sequence[Graph], settings: Settings) -> tuple[Pattern, list[Value]] | None:
    """Returns the pattern of a step and the values it takes from outside; None if gradient may flow into an earlier
    step, that of a recorded value is asked for, or a backward stops for hooks.

    Args:
        graphs: All that was recorded and has not run, in order.
        settings: Of the program.
    """
    places: dict[MicroBatch, int] = {graph: place for place, graph in enumerate(graphs)}
    sources: dict[Value, int] = {}
    targets: dict[Any, None] = {}
    notes: list[_GraphNote] = []
    for graph in graphs:
        if any(backward.requested is not None and backward.requested.values for backward in graph.backwards):
            return None
        if any(backward.stops is not None for backward in graph.backwards):
            return None
        backwards = [
            (
                graph.positions(backward.roots),
                backward.retain_graph,
                backward.requested and (backward.requested.names, len(backward.requested.outside)),
            )
            for backward in graph.backwards
        ]
        origins: list[Any] = []
        for value in graph.sources:
            call = value.call
            if call is not None and call.graph in places:
                origins.append((places[call.graph], call.index, value.index))
            elif call is not None and value.meta.requires_grad:
                return None
            else:
                origins.append(sources.setdefault(value, len(sources)))
        targets.update({note[0]: None for note in graph.record})
        notes.append(_GraphNote(tuple(graph.record), tuple(origins), tuple(backwards)))
    leaves = [
        (
            leaf,
            leaf.stage,
            leaf.has_buffers,
            leaf.parameter_names,
            tuple(map(_known_of, leaf.placed)),
        )
        for leaf in targets
        if isinstance(leaf, ModuleTarget)
    ]
    outside = [(value.meta, value.stage, value.name, value.gradient_of) for value in sources]
    return Pattern(settings, tuple(notes), tuple(outside), tuple(leaves)), list(sources)


class PatternStep(NamedTuple):
    """Graphs as they were recorded, as far as a program depends on them; and the values they take from outside."""

    graphs: list[Graph]
    sources: list[Value]


_known_of = attrgetter("name", "stage", "meta", "is_parameter", "is_shared", "is_written", "tensor.requires_grad")
"""Reads what programs depend on of a parameter or buffer, for all of a model at each step: without calls in Python."""


class _Placed(NamedTuple):
    """A parameter or buffer as a pattern knows it: what `_known_of` gives of it."""

    name: str
    stage: int
    meta: Any
    is_parameter: bool
    is_shared: bool
    is_written: bool
    requires_grad: bool

    @property
    def is_trained(self) -> bool:
        """Returns whether it is a parameter that gets gradient."""
        return self.is_parameter and self.requires_grad


class _Leaf(ModuleTarget):
    """A leaf as a pattern knows it: the target of a call in a step that is rebuilt from a pattern."""

    def __init__(
        self, leaf: ModuleTarget, stage: int, has_buffers: bool, parameter_names: frozenset[str], placed: Sequence[Any]
    ) -> None:
        self.leaf = leaf
        self.stage = stage
        self.has_buffers = has_buffers
        self.parameter_names = parameter_names
        self.placed = [_Placed(*item) for item in placed]


def step_of_pattern(pattern: Pattern) -> PatternStep:
    """Make what a program can be built from."""
    leaves = {note[0]: _Leaf(*note) for note in pattern.leaves}
    sources: list[Value] = []
    for meta, stage, name, gradient_of in pattern.sources:
        sources.append(Value(meta, stage, name=name))
        sources[-1].gradient_of = gradient_of
    graphs: list[Graph] = []
    for note in pattern.graphs:
        graph = Graph(len(graphs))
        graphs.append(graph)
        own = [
            sources[origin] if isinstance(origin, int) else graphs[origin[0]].calls[origin[1]].outputs[origin[2]]
            for origin in note.sources
        ]
        for value in own:
            graph.add_source(value)
        for target, entry, stage, level, positions, are_lazy in note.record:
            values = _values_at(positions, graph, own)
            lazy = iter(values)
            arguments = [next(lazy) if is_lazy else None for is_lazy in are_lazy] if are_lazy else values
            call = Call(
                target=leaves.get(target),
                template=None,
                arguments=arguments,
                entry=entry,
                stage=stage,
                modes=None,
                where=None,
            )
            used = [item for i, item in enumerate(arguments) if item is not None and i not in entry.unused]
            graph.put(call, used, level)
            call.outputs = tuple([Value(meta, stage, call=call, index=i) for i, meta in enumerate(entry.metas)])
        for positions, retain_graph, requested in note.backwards:
            roots = _values_at(positions, graph, own)
            graph.backwards.append(
                Backward(
                    graph,
                    roots,
                    [None] * len(roots),
                    retain_graph=retain_graph,
                    requested=requested and RequestedGradients(requested[0], [None] * requested[1]),
                    where=None,
                )
            )
    return PatternStep(graphs, sources)


def _values_at(positions: Sequence[int], graph: Graph, sources: Sequence[Value]) -> list[Value]:
    return [
        sources[-1 - position] if position < 0 else graph.calls[position >> OUTPUT_BITS].outputs[position & _OUTPUT]
        for position in positions
    ]
