"""A program in numbers: the same for all steps that look alike.

    numbers    Lowered       who does what, when, and which messages go: of parts, edges, values by their numbers
               Contents      what these are: calls, outputs, segments of the step, by theirs
    objects    Objects       the parts, edges, values of one step
               Program       what one rank runs

`lower` writes the numbers while it builds, with the objects of its step. Those of another step are made of `Contents`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from farspan.graph import Backward, BackwardSegment, Call, Edge, Graph, Segment, Value
from farspan.plan import Worker
from farspan.program.program import Action, Channel, Message, Program, Reduction
from farspan.schedule import Kind, Schedule

__all__ = ["ActionNote", "Contents", "Lowered", "MessageNote", "Objects", "contents_of"]

_NO_CALL = -1


class MessageNote(NamedTuple):
    """A message."""

    task: int
    channel: Channel
    items: tuple[int, ...]
    """Edges, or values."""


class ActionNote(NamedTuple):
    """An action."""

    part: int | None
    segment: tuple[int, int] | None
    """(graph, number); which of the two it runs."""
    kind: Kind
    micro_batch: int
    leaves_weights: bool
    receives: tuple[int, ...]
    posts: tuple[int, ...]
    sends: tuple[int, ...]
    queue: int
    after: tuple[int, ...]
    """Other actions."""


class Objects(NamedTuple):
    """What the numbers of a program stand for in one step."""

    graphs: Sequence[Graph]
    values: Sequence[Value]
    edges: Sequence[Edge]
    parts: Sequence[BackwardSegment]
    """Those of this rank."""
    outlines: Sequence[BackwardSegment]
    """Those of others that exchange gradients with these, numbered after them; their contents need not be known."""
    released: list[Call]
    reaches: dict[int, int]
    """See `Program`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """One rank's part of a step, as in `Program`."""

    actions: tuple[ActionNote, ...]
    messages: tuple[MessageNote, ...]
    prologue_sends: tuple[int, ...]
    prologue_receives: tuple[int, ...]
    reductions: tuple[tuple[int, int | None], ...]
    """Parts, and messages."""
    reduction_messages: tuple[int, ...]
    late_reductions: frozenset[str]
    is_summed: bool
    carried: tuple[tuple[int, int], ...]
    """Edges."""
    replicas: frozenset[tuple[str, Worker]]
    gpu_channels: frozenset[Channel]
    num_micro_batches: int
    schedule: Schedule

    def bind(self, objects: Objects) -> Program:
        """Returns the program of the step that has these objects."""
        graphs, values, edges, parts, outlines, released, reaches = objects
        messages = [
            Message(task, channel, [(edges if channel.is_gradient else values)[number] for number in items])
            for task, channel, items in self.messages
        ]
        actions: list[Action] = []
        for part, segment, kind, micro_batch, leaves_weights, receives, posts, sends, queue, _ in self.actions:
            if part is not None:
                work: Segment | BackwardSegment = parts[part]
            else:
                assert segment is not None
                work = graphs[segment[0]].segments[segment[1]]
            actions.append(
                Action(
                    work,
                    kind,
                    micro_batch,
                    leaves_weights,
                    [messages[number] for number in receives],
                    [messages[number] for number in posts],
                    [messages[number] for number in sends],
                    queue,
                )
            )
        for action, note in zip(actions, self.actions, strict=True):
            if note.after:
                action.after = [actions[number] for number in note.after]
        return Program(
            actions=actions,
            prologue_sends=[messages[number] for number in self.prologue_sends],
            prologue_receives=[messages[number] for number in self.prologue_receives],
            reductions=[
                Reduction(parts[part], None if message is None else messages[message])
                for part, message in self.reductions
            ],
            reduction_messages=[messages[number] for number in self.reduction_messages],
            late_reductions=self.late_reductions,
            is_summed=self.is_summed,
            carried={edges[one]: edges[following] for one, following in self.carried},
            replicas=self.replicas,
            reaches=reaches,
            released=released,
            parts=[*parts, *outlines],
            gpu_channels=self.gpu_channels,
            num_micro_batches=self.num_micro_batches,
            schedule=self.schedule,
            likeness=self,
        )


class _Part(NamedTuple):
    backward: int
    segment: tuple[int, int] | None
    """(graph, number)."""
    stage: int
    order: tuple[int, ...]
    """With the number of the graph in the step."""
    calls: tuple[int, ...]
    accumulates_into: tuple[int | str, ...]
    """Leaves, by a call of theirs, and names."""
    incoming: tuple[int, ...]
    outgoing: tuple[int, ...]


class _Edge(NamedTuple):
    key: int | str
    """A value's number, or a parameter's name."""
    meta: Any
    src: int
    dst: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the numbers of a program stand for in all steps that look alike.

    Calls are numbered through the step; so are the values that are not made in it.
    """

    values: tuple[tuple[int, int], ...]
    """(call, output), or (-1, number of the source)."""
    num_users: tuple[tuple[int, int], ...]
    """Of values that come from other ranks."""
    edges: tuple[_Edge, ...]
    parts: tuple[_Part, ...]
    outlines: tuple[_Part, ...]
    """Without their contents."""
    released: tuple[int, ...]
    reaches: tuple[tuple[int, int], ...]
    """By the numbers of graphs in the step."""
    reached: tuple[tuple[int, frozenset[str | Value]], ...]
    """By number of a backward of which gradients are requested: see `RequestedGradients.reached`."""

    def of(self, graphs: Sequence[Graph], sources: Sequence[Value]) -> Objects:
        """Returns the objects of a step.

        Args:
            graphs: What was recorded.
            sources: The values that it takes from outside, as `pattern_of` gives them.
        """
        calls = [call for graph in graphs for call in graph.calls]
        backwards = _backwards_of(graphs)
        values = [sources[number] if call == _NO_CALL else calls[call].outputs[number] for call, number in self.values]
        for value, count in self.num_users:
            values[value].num_users = count
        for number, names in self.reached:
            requested = backwards[number].requested
            assert requested is not None
            requested.reached.update(names)
        parts: list[BackwardSegment] = []
        for note in (*self.parts, *self.outlines):
            place, level, index = note.order
            segment = None if note.segment is None else graphs[note.segment[0]].segments[note.segment[1]]
            part = BackwardSegment(backwards[note.backward], segment, note.stage, (graphs[place].index, level, index))
            part.calls = [calls[number] for number in note.calls]
            part.accumulates_into = {
                key if isinstance(key, str) else calls[key].target: None for key in note.accumulates_into
            }
            parts.append(part)
        edges = [
            Edge(key if isinstance(key, str) else values[key], meta, parts[src], parts[dst])
            for key, meta, src, dst in self.edges
        ]
        for part, note in zip(parts, (*self.parts, *self.outlines), strict=True):
            part.incoming = [edges[number] for number in note.incoming]
            part.outgoing = [edges[number] for number in note.outgoing]
        return Objects(
            graphs=graphs,
            values=values,
            edges=edges,
            parts=parts[: len(self.parts)],
            outlines=parts[len(self.parts) :],
            released=[calls[number] for number in self.released],
            reaches={graphs[last].index: graphs[first].index for last, first in self.reaches},
        )


def contents_of(objects: Objects, sources: Iterable[Value]) -> Contents:
    """Note down what the objects of a step are; none of them may come from an earlier step.

    Args:
        objects: As `lower` gives them.
        sources: The values that the step takes from outside.
    """
    graphs = objects.graphs
    places = {graph.index: place for place, graph in enumerate(graphs)}
    calls = _numbered(call for graph in graphs for call in graph.calls)
    source_numbers = _numbered(sources)
    backwards = _numbered(_backwards_of(graphs))
    edges, values = _numbered(objects.edges), _numbered(objects.values)
    parts = _numbered((*objects.parts, *objects.outlines))

    def noted(part: BackwardSegment, *, is_own: bool) -> _Part:
        segment, (index, level, number) = part.segment, part.order
        call_of = {call.target: calls[call] for call in part.calls} if is_own else {}
        return _Part(
            backwards[part.backward],
            None if segment is None else (places[segment.graph.index], segment.index),
            part.stage,
            (places[index], level, number),
            tuple([calls[call] for call in part.calls]) if is_own else (),
            tuple([key if isinstance(key, str) else call_of[key] for key in part.accumulates_into]) if is_own else (),
            tuple([edges[edge] for edge in part.incoming if edge in edges]),
            tuple([edges[edge] for edge in part.outgoing if edge in edges]),
        )

    def place_of(value: Value) -> tuple[int, int]:
        source = source_numbers.get(value)
        if source is not None:
            return _NO_CALL, source
        assert value.call is not None
        return calls[value.call], value.index

    return Contents(
        values=tuple(map(place_of, values)),
        num_users=tuple([(number, value.num_users) for value, number in values.items() if value.num_users]),
        edges=tuple(
            [
                _Edge(
                    edge.key if isinstance(edge.key, str) else values[edge.key],
                    edge.meta,
                    parts[edge.src],
                    parts[edge.dst],
                )
                for edge in edges
            ]
        ),
        parts=tuple([noted(part, is_own=True) for part in objects.parts]),
        outlines=tuple([noted(part, is_own=False) for part in objects.outlines]),
        released=tuple([calls[call] for call in objects.released]),
        reaches=tuple([(places[last], places[first]) for last, first in objects.reaches.items()]),
        reached=tuple(
            [
                (number, frozenset(backward.requested.reached))
                for backward, number in backwards.items()
                if backward.requested is not None
            ]
        ),
    )


def _numbered(items: Iterable[Any]) -> dict[Any, int]:
    return {item: number for number, item in enumerate(items)}


def _backwards_of(graphs: Iterable[Graph]) -> list[Backward]:
    return [backward for graph in graphs for backward in graph.backwards]
