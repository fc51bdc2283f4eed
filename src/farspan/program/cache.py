"""The programs of a rank's steps: made once for all steps that look alike, of which the patterns are equal.

A pattern is all that a program depends on, as data that can be compared. What it does not hold the program cannot
depend on: tests build each program a second time, from stand-ins for the graphs that know nothing but the pattern.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from farspan.graph import Graph, MicroBatch, ModuleTarget, Value
from farspan.program.lower import lower
from farspan.program.lowered import Contents, Lowered, contents_of
from farspan.program.options import Settings
from farspan.program.program import Program
from farspan.program.route import take_turns

__all__ = ["Pattern", "Programs", "pattern_of"]

_MOST_KEPT = 8
"""Patterns: steps of training, of evaluation, the last one of an epoch, which is shorter."""


class Programs:
    """Makes programs, and keeps what those of the latest patterns have in common."""

    def __init__(self) -> None:
        self._latest: deque[tuple[Pattern, Lowered, Contents]] = deque(maxlen=_MOST_KEPT)
        """The latest one first."""

    @property
    def num_kept(self) -> int:
        return len(self._latest)

    def program_of(self, graphs: Sequence[Graph], settings: Settings) -> Program:
        """Returns the program of a rank for a step, with less work where steps like this one were among the latest.

        Args:
            graphs: All that was recorded and has not run, in order.
            settings: Whose program, and how.
        """
        take_turns(graphs, settings.teams)
        found = pattern_of(graphs, settings)
        if found is None:
            lowered, objects = lower(graphs, settings)
            return lowered.bind(objects)
        pattern, sources = found
        for number, kept in enumerate(self._latest):
            if kept[0] == pattern:
                del self._latest[number]
                self._latest.appendleft(kept)
                _, lowered, contents = kept
                return lowered.bind(contents.of(graphs, sources))
        lowered, objects = lower(graphs, settings)
        self._latest.appendleft((pattern, lowered, contents_of(objects, sources)))
        return lowered.bind(objects)


class _GraphNote(NamedTuple):
    record: tuple[tuple[Any, ...], ...]
    """See `Graph.record`."""
    sources: tuple[Any, ...]
    """For each: its number in the step, or, if an earlier graph of the step makes it, (graph, call, output)."""
    backwards: tuple[tuple[Any, ...], ...]
    """For each: positions of its roots, whether it retains the graph, what is requested of it."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A step without its data."""

    settings: Settings
    graphs: tuple[_GraphNote, ...]
    sources: tuple[tuple[Any, ...], ...]
    """What is not made in the step: metadata, stage, name, of which parameter it is the gradient."""
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


_known_of = attrgetter("name", "stage", "meta", "is_parameter", "is_shared", "is_written", "tensor.requires_grad")
"""What programs depend on of a parameter or buffer, asked for all of a model at each step: without calls in Python."""
