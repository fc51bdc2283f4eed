"""Stand-ins for recorded graphs, made of a pattern alone: what it does not hold nothing built from them depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from farspan.graph import OUTPUT_BITS, Backward, Call, Graph, ModuleTarget, RequestedGradients, Value
from farspan.program.cache import Pattern

__all__ = ["StandIns", "stand_ins"]

_OUTPUT = (1 << OUTPUT_BITS) - 1


class StandIns(NamedTuple):
    """Graphs as they were recorded, as far as a program depends on them; and the values they take from outside."""

    graphs: list[Graph]
    sources: list[Value]


class _Placed(NamedTuple):
    """Stands in for a parameter or buffer: what `_known_of` gives."""

    name: str
    stage: int
    meta: Any
    is_parameter: bool
    is_shared: bool
    is_written: bool
    requires_grad: bool

    @property
    def is_trained(self) -> bool:
        """Whether it is a parameter that gets gradient."""
        return self.is_parameter and self.requires_grad


class _Leaf(ModuleTarget):
    """Stands in for a leaf."""

    def __init__(
        self, leaf: ModuleTarget, stage: int, has_buffers: bool, parameter_names: frozenset[str], placed: Sequence[Any]
    ) -> None:
        self.leaf = leaf
        self.stage = stage
        self.has_buffers = has_buffers
        self.parameter_names = parameter_names
        self.placed = [_Placed(*item) for item in placed]
        self.buffers = ()
        self.state = self.own_objects = None
        self.versions = ()


def stand_ins(pattern: Pattern) -> StandIns:
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
                modes=(),
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
    return StandIns(graphs, sources)


def _values_at(positions: Sequence[int], graph: Graph, sources: Sequence[Value]) -> list[Value]:
    return [
        sources[-1 - position] if position < 0 else graph.calls[position >> OUTPUT_BITS].outputs[position & _OUTPUT]
        for position in positions
    ]
