"""A program without the step it was built for: the same for all steps of one pattern.

Calls are numbered through the step; so are the values that are not made in it. Where a program has a value, a segment,
a part, its layout has the number, and `bind` puts those of a new step in their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from farspan.graph import BackwardSegment, Edge, Graph, Segment, Value, release
from farspan.plan import Worker
from farspan.program.lower import build_program
from farspan.program.pattern import Pattern, step_of_pattern
from farspan.program.program import Action, Channel, Message, Program, Reduction
from farspan.schedule import Kind, Schedule

__all__ = ["Layout", "layout_of"]

_NO_CALL = -1


class _Part(NamedTuple):
    backward: int
    segment: tuple[int, int] | None
    """(graph, number)."""
    stage: int
    order: tuple[int, ...]
    """Its order, with the number of the graph in the step."""
    calls: tuple[int, ...]
    accumulates_into: tuple[Any, ...]
    incoming: tuple[int, ...]
    outgoing: tuple[int, ...]


class _Edge(NamedTuple):
    key: int | str
    """A value's number, or a parameter's name."""
    meta: Any
    src: int
    dst: int


class _Message(NamedTuple):
    task: int
    channel: Channel
    items: tuple[int, ...]
    """Edges, or values."""


class _Action(NamedTuple):
    part: int | None
    segment: tuple[int, int] | None
    """The number of the segment that it runs, if it runs one."""
    kind: Kind
    micro_batch: int
    leaves_weights: bool
    receives: tuple[int, ...]
    posts: tuple[int, ...]
    sends: tuple[int, ...]
    queue: int
    after: tuple[int, ...]
    """Other actions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout from which `bind` makes programs."""

    values: tuple[tuple[int, int], ...]
    """(call, output), or (-1, number of the source)."""
    num_users: tuple[tuple[int, int], ...]
    """Numbers of users of the values that come from other ranks."""
    edges: tuple[_Edge, ...]
    parts: tuple[_Part, ...]
    """The backward segments of this rank, and of others, without their contents, where they exchange gradients with
    these."""
    messages: tuple[_Message, ...]
    actions: tuple[_Action, ...]
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
    reaches: tuple[tuple[int, int], ...]
    """See `Program.reaches`; by the numbers of graphs in the step."""
    released: tuple[int, ...]
    reached: tuple[tuple[int, frozenset[str | Value]], ...]
    """For each backward of which gradients are requested, by number: see `RequestedGradients.reached`."""
    gpu_channels: frozenset[Channel]
    num_micro_batches: int
    schedule: Schedule

    def bind(self, graphs: Sequence[Graph], sources: Sequence[Value]) -> Program:
        """Returns the program of a step.

        Args:
            graphs: Of a step of the pattern this was made for.
            sources: The values that it takes from outside, as `pattern_of` gives them.
        """
        calls = [call for graph in graphs for call in graph.calls]
        backwards = [backward for graph in graphs for backward in graph.backwards]
        values = [sources[number] if call == _NO_CALL else calls[call].outputs[number] for call, number in self.values]
        for value, count in self.num_users:
            values[value].num_users = count
        for number, names in self.reached:
            requested = backwards[number].requested
            assert requested is not None
            requested.reached.update(names)
        parts: list[BackwardSegment] = []
        for note in self.parts:
            place, level, index = note.order
            segment = None if note.segment is None else graphs[note.segment[0]].segments[note.segment[1]]
            part = BackwardSegment(backwards[note.backward], segment, note.stage, (graphs[place].index, level, index))
            part.calls = [calls[number] for number in note.calls]
            part.accumulates_into = dict.fromkeys(note.accumulates_into)
            parts.append(part)
        edges = [
            Edge(key if isinstance(key, str) else values[key], meta, parts[src], parts[dst])
            for key, meta, src, dst in self.edges
        ]
        for part, note in zip(parts, self.parts, strict=True):
            part.incoming = [edges[number] for number in note.incoming]
            part.outgoing = [edges[number] for number in note.outgoing]
        messages: list[Message] = []
        for task, channel, items in self.messages:
            message = Message(task, channel)
            things = edges if message.is_gradient else values
            message.items = dict.fromkeys([things[number] for number in items])
            messages.append(message)
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
            reaches={graphs[last].index: graphs[first].index for last, first in self.reaches},
            released=[calls[number] for number in self.released],
            parts=parts,
            gpu_channels=set(self.gpu_channels),
            num_micro_batches=self.num_micro_batches,
            schedule=self.schedule,
        )


def layout_of(pattern: Pattern) -> Layout:
    """Build the program of all steps of a pattern."""
    step = step_of_pattern(pattern)
    program = build_program(step.graphs, pattern.settings)
    calls = {call: number for number, call in enumerate(call for graph in step.graphs for call in graph.calls)}
    sources = {value: number for number, value in enumerate(step.sources)}
    all_backwards = [backward for graph in step.graphs for backward in graph.backwards]
    backwards = {backward: number for number, backward in enumerate(all_backwards)}
    parts: dict[BackwardSegment, int] = {}
    edges: dict[Edge, int] = {}
    values: dict[Value, int] = {}
    messages: dict[Message, int] = {}
    for part in [task.work for task in program.actions if isinstance(task.work, BackwardSegment)]:
        _number_of(part, parts)
    for part, _ in program.reductions:
        _number_of(part, parts)
    own = list(parts)
    for edge in [edge for part in own for edge in (*part.incoming, *part.outgoing)]:
        _number_of(edge, edges)
        _number_of(edge.src, parts)
        _number_of(edge.dst, parts)
    edge_notes = [
        _Edge(
            edge.key if isinstance(edge.key, str) else _number_of(edge.key, values),
            edge.meta,
            parts[edge.src],
            parts[edge.dst],
        )
        for edge in edges
    ]
    for message in (*program.prologue_sends, *program.prologue_receives, *program.reduction_messages):
        _number_of(message, messages)
    for message in [message for task in program.actions for message in (*task.receives, *task.posts, *task.sends)]:
        _number_of(message, messages)
    message_notes = [
        _Message(
            message.task,
            message.channel,
            tuple([edges[item] if isinstance(item, Edge) else _number_of(item, values) for item in message.items]),
        )
        for message in messages
    ]
    part_notes = [
        _Part(
            backwards[part.backward],
            _place_of(part.segment),
            part.stage,
            part.order,
            tuple([calls[call] for call in part.calls]) if number < len(own) else (),
            tuple([getattr(key, "leaf", key) for key in part.accumulates_into]) if number < len(own) else (),
            tuple([edges[edge] for edge in part.incoming if edge in edges]),
            tuple([edges[edge] for edge in part.outgoing if edge in edges]),
        )
        for part, number in parts.items()
    ]
    numbers = {id(action): number for number, action in enumerate(program.actions)}
    actions = [
        _Action(
            parts[task.work] if isinstance(task.work, BackwardSegment) else None,
            _place_of(task.work) if isinstance(task.work, Segment) else None,
            task.kind,
            task.micro_batch,
            task.leaves_weights,
            tuple([messages[message] for message in task.receives]),
            tuple([messages[message] for message in task.posts]),
            tuple([messages[message] for message in task.sends]),
            task.queue,
            tuple([numbers[id(other)] for other in task.after]),
        )
        for task in program.actions
    ]
    layout = Layout(
        values=tuple(
            [(_NO_CALL, sources[value]) if value.call is None else (calls[value.call], value.index) for value in values]
        ),
        num_users=tuple([(number, value.num_users) for value, number in values.items() if value.num_users]),
        edges=tuple(edge_notes),
        parts=tuple(part_notes),
        messages=tuple(message_notes),
        actions=tuple(actions),
        prologue_sends=tuple([messages[message] for message in program.prologue_sends]),
        prologue_receives=tuple([messages[message] for message in program.prologue_receives]),
        reductions=tuple(
            [(parts[part], None if message is None else messages[message]) for part, message in program.reductions]
        ),
        reduction_messages=tuple([messages[message] for message in program.reduction_messages]),
        late_reductions=program.late_reductions,
        is_summed=program.is_summed,
        carried=tuple([(edges[one], edges[following]) for one, following in program.carried.items()]),
        replicas=program.replicas,
        reaches=tuple(program.reaches.items()),
        released=tuple([calls[call] for call in program.released]),
        reached=tuple(
            [
                (number, frozenset(backward.requested.reached))
                for backward, number in backwards.items()
                if backward.requested is not None
            ]
        ),
        gpu_channels=frozenset(program.gpu_channels),
        num_micro_batches=program.num_micro_batches,
        schedule=program.schedule,
    )
    release(step.graphs, program.released, program.parts)
    return layout


def _number_of(item: Any, numbers: dict[Any, int]) -> int:
    """Returns its number; the next one if it has none."""
    return numbers.setdefault(item, len(numbers))


def _place_of(segment: Segment | None) -> tuple[int, int] | None:
    return None if segment is None else (segment.graph.index, segment.index)
