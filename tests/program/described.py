"""Programs taken apart to be compared: task for task, message for message, edge for edge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.program.stand_ins import stand_ins

from farspan.call.leaf import Leaf
from farspan.graph import Backward, BackwardSegment, Call, Edge, Graph, Segment, Value
from farspan.program.cache import Programs, pattern_of
from farspan.program.lower import lower
from farspan.program.lowered import contents_of
from farspan.program.options import Settings
from farspan.program.program import Message, Program
from farspan.program.route import take_turns

__all__ = ["CheckedPrograms", "build_program", "described", "itself", "number_of"]

Name = Callable[[Any], Any]


def itself(item: Any) -> Any:
    """Names each object by itself: programs of the same graphs."""
    return item


def number_of(item: Any) -> Any:
    """Names each object by where it stands: programs of graphs that look alike."""
    match item:
        case Graph():
            return item.index
        case Segment():
            return "segment", item.order, item.stage
        case Call():
            return "call", item.graph.index, item.index
        case Value():
            return "value", item.stage, item.name, item.index, item.call and number_of(item.call), item.meta
        case Backward():
            return "backward", item.graph.index, item.graph.backwards.index(item)
        case Leaf():
            return "leaf", item.name
        case _:
            return item


def described(program: Program, name: Name = itself) -> dict[str, Any]:
    """All that a program says.

    Args:
        program: As it is before it runs.
        name: Names graphs, segments, calls, values, backwards and leaves.
    """
    sent = [message for action in program.actions for message in action.sends]
    known = [*program.prologue_sends, *program.prologue_receives, *program.reduction_messages, *sent]
    messages = list(dict.fromkeys(known))
    messages += [message for action in program.actions for message in action.posts if message not in messages]
    numbers = {message: number for number, message in enumerate(messages)}
    parts = [action.work for action in program.actions if isinstance(action.work, BackwardSegment)]
    parts += [reduction.part for reduction in program.reductions]
    received = [item for message in messages for item in message.items if isinstance(item, Value)]
    return {
        "steps": [
            (
                _part(action.work, name) if isinstance(action.work, BackwardSegment) else name(action.work),
                action.kind,
                action.micro_batch,
                action.leaves_weights,
                [numbers[message] for message in action.receives],
                [numbers[message] for message in action.posts],
                [numbers[message] for message in action.sends],
                action.queue,
                [program.actions.index(other) for other in action.after],
            )
            for action in program.actions
        ],
        "messages": [_message(message, name) for message in messages],
        "prologue": [numbers[message] for message in (*program.prologue_sends, *program.prologue_receives)],
        "reductions": [
            (_part(part, name), None if message is None else numbers[message]) for part, message in program.reductions
        ],
        "reduction messages": [numbers[message] for message in program.reduction_messages],
        "late reductions": program.late_reductions,
        "is summed": program.is_summed,
        "carried": [(_edge(one, name), _edge(following, name)) for one, following in program.carried.items()],
        "replicas": program.replicas,
        "users": [(name(value), value.num_users) for value in received],
        "reaches": program.reaches,
        "reached": [set(part.backward.requested.reached) for part in parts if part.backward.requested],
        "released": list(map(name, program.released)),
        "gpu channels": program.gpu_channels,
        "micro-batches": program.num_micro_batches,
        "schedule": program.schedule,
    }


def _message(message: Message, name: Name) -> Any:
    items = [_edge(item, name) if isinstance(item, Edge) else name(item) for item in message.items]
    return (
        message.task,
        message.channel,
        items,
        message.tensors,
        message.works,
        message.strides,
    )


def _part(part: BackwardSegment, name: Name) -> Any:
    return (
        _outline(part, name),
        list(map(name, part.calls)),
        list(map(name, part.accumulates_into)),
        [_edge(edge, name) for edge in part.incoming],
        [_edge(edge, name) for edge in part.outgoing],
    )


def _outline(part: BackwardSegment, name: Name) -> Any:
    return name(part.backward), part.segment and name(part.segment), part.stage, part.order


def _edge(edge: Edge, name: Name) -> Any:
    return name(edge.key), edge.meta, _outline(edge.src, name), _outline(edge.dst, name)


def build_program(graphs: Sequence[Graph], settings: Settings) -> Program:
    """The program of a step, built from its graphs."""
    take_turns(graphs, settings.teams)
    lowered, objects = lower(graphs, settings)
    return lowered.bind(objects)


class CheckedPrograms(Programs):
    """Builds each program from the stand-ins of its pattern, and compares it with the one that is built from graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.num_compared = 0

    def program_of(self, graphs: Sequence[Graph], settings: Settings) -> Program:
        take_turns(graphs, settings.teams)
        known = pattern_of(graphs, settings)
        if known is None:
            return super().program_of(graphs, settings)
        lowered, objects = lower(graphs, settings)
        requested = described(lowered.bind(objects))
        contents, super_program_of = contents_of(objects, known[1]), super().program_of
        step = stand_ins(known[0])
        take_turns(step.graphs, settings.teams)
        other, stand_in_objects = lower(step.graphs, settings)
        assert other == lowered, "it depends on what is not in the pattern"
        assert contents_of(stand_in_objects, step.sources) == contents, "it depends on what is not in the pattern"
        for make in (lambda: lowered.bind(contents.of(graphs, known[1])), lambda: super_program_of(graphs, settings)):
            _forget(graphs)
            program = make()
            found = described(program)
            for what, part in requested.items():
                assert found[what] == part, f"{what} of a kept program"
        self.num_compared += 1
        return program


def _forget(graphs: Sequence[Graph]) -> None:
    """What making a program leaves in what was recorded."""
    for value in [value for graph in graphs for segment in graph.segments for value in segment.inputs]:
        value.num_users = 0
    for backward in [backward for graph in graphs for backward in graph.backwards]:
        if backward.requested is not None:
            backward.requested.reached.clear()
