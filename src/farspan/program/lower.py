"""A rank's program, and the schedule of all ranks, made of recorded graphs.

Built from the recorded graphs alone, by the same pure functions on every rank: sender and receiver agree on every
message without exchanging a word.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from farspan.graph import (
    EVERYWHERE,
    Backward,
    BackwardSegment,
    Call,
    Edge,
    Graph,
    ModuleTarget,
    Segment,
    Value,
    route,
    whole_name,
)
from farspan.plan import Worker
from farspan.program.beside import Arrival, Broadcasts, Reductions, apart, late_names
from farspan.program.lowered import ActionNote, Lowered, MessageNote, Objects
from farspan.program.options import Settings
from farspan.program.program import PROLOGUE, Channel
from farspan.program.route import Channels, queues_of, together
from farspan.program.tasks import BackwardWork, ForwardWork, StepTasks, StepWork, scheduled
from farspan.schedule import Kind, as_sent, is_worth_splitting, places_of, run_ahead_of

__all__ = ["has_weights", "lower"]


class _Numbers:
    """Numbers of what this rank's part of a step is about, in the order in which it occurs.

    Args:
        own: The backward work of this rank.
    """

    def __init__(self, own: Iterable[BackwardSegment]) -> None:
        self.parts = {part: number for number, part in enumerate(dict.fromkeys(own))}
        """Its own, and those that exchange gradients with these."""
        self.num_own = len(self.parts)
        self.edges: dict[Edge, int] = {}
        self.values: dict[Value, int] = {}
        self.messages: list[MessageNote] = []
        for edge in [edge for part in list(self.parts) for edge in (*part.incoming, *part.outgoing)]:
            _number(edge, self.edges)
            _number(edge.src, self.parts)
            _number(edge.dst, self.parts)
            if isinstance(edge.key, Value):
                _number(edge.key, self.values)

    def message(self, task: int, channel: Channel, items: Iterable[Value | Edge]) -> int:
        """Note down a message; its number."""
        numbers = [_number(item, self.edges if isinstance(item, Edge) else self.values) for item in items]
        self.messages.append(MessageNote(task, channel, tuple(numbers)))
        return len(self.messages) - 1


class _Messages:
    """The numbers of messages, by task; those sent and received before the first one at `PROLOGUE`."""

    def __init__(self) -> None:
        self.receives = collections.defaultdict[int, list[int]](list)
        self.posts = collections.defaultdict[int, list[int]](list)
        self.sends = collections.defaultdict[int, list[int]](list)
        self.beside: dict[tuple[int, Channel], int] = {}
        """Those that bring gradients of parameters."""


class _Builder:
    def __init__(self, graphs: Sequence[Graph], settings: Settings) -> None:
        routes = _routes(graphs, settings)
        self.graphs = graphs
        self.queues = queues_of(settings.teams, settings.num_ranks)
        self.settings = settings
        self.rank = settings.rank
        self.channels = Channels(settings.teams, settings.devices)
        self.items: dict[tuple[int, Channel], dict[Value | Edge, None]] = {}
        """What this rank sends and receives, by the task that sends it and the way it takes."""
        self.users: dict[Channel, dict[int, list[int]]] = {}
        """By channel on which this rank receives and task that sends: those that need it."""
        self.num_users: dict[Value, int] = {}
        """Of values that this rank receives."""
        self.trains: dict[object, bool] = {}
        """Of the leaves found so far, whether they have a parameter that is trained."""
        self.positions = {graph.index: position for position, graph in enumerate(graphs)}
        self.keys: dict[object, int] = {}
        """Numbers of what calls must find as others have left it, or add gradients to: leaves, and names."""
        self.segments = [
            segment for graph in graphs for segment in sorted(graph.segments, key=lambda segment: segment.order)
        ]
        self.all_parts = [part for _, parts in routes for part in parts]
        keeps_order = settings.gradient_reduction == "exact"
        self.parts, homes = apart(self.all_parts, keeps_order=keeps_order)
        self.homes = dict.fromkeys(homes)
        self.broadcasts = Broadcasts(settings.replicas)
        self.reductions = Reductions(self.rank, late=late_names(graphs, self.parts))
        parts_of = collections.Counter([part.segment for part in self.parts if part.segment is not None])
        self.shared = {segment for segment, count in parts_of.items() if count > 1}
        """Segments through which several backwards go: in the program's order, since the last one releases them."""
        self.touched = dict.fromkeys([item.gradient_of for segment in self.segments for item in _gradients_in(segment)])
        """The parameters whose gradients forwards of the step read or write."""
        self.number_of_segment = {segment: number for number, segment in enumerate(self.segments)}
        self.number_of_part = {part: number for number, part in enumerate(self.parts)}
        self.foreign = {number for number, each in enumerate(self.segments) if not settings.teams[each.stage].owns}
        """Forwards of stages that own nothing: parameters come to them beside the tasks, and stay."""
        with_backward = {backward.graph.index for backward, _ in routes}
        releasing = _releasing(routes)
        run_ahead = run_ahead_of(settings.schedule, settings.lookahead)
        work = StepWork(
            tuple([self.forward(each, each.graph.index in with_backward, each in releasing) for each in self.segments]),
            tuple([self.backward(part, releasing) for part in self.parts]),
            together(settings.teams, self.queues),
        )
        num_queues = max([settings.num_ranks - 1, *self.queues.values()]) + 1
        self.tasks = _scheduled(work, settings.schedule, num_queues, run_ahead)
        self.place = {**places_of(self.tasks.schedule), PROLOGUE: -1}
        self.lookahead = settings.lookahead - run_ahead
        for task, segment in enumerate(self.segments):
            for value in segment.inputs:
                if value.stage != EVERYWHERE:
                    source = self.number_of_segment.get(value.segment, PROLOGUE) if value.segment else PROLOGUE
                    self.connect(source, self.worker_of(value), task, self.worker_of(segment), value)
        for part, task in zip(self.parts, self.tasks.backwards, strict=True):
            for edge in part.incoming:
                number = self.number_of_part.get(edge.src)  # None for what an earlier flush has computed
                source = PROLOGUE if number is None else self.tasks.backwards[number]
                self.connect(source, self.worker_of(edge.src), task, self.worker_of(part), edge)
        arrivals = [self.arrival(part) for part in homes]
        if not keeps_order:
            arrivals = self.reductions.carry(arrivals, self.place)
        for arrival in arrivals:
            self.reductions.add(arrival)

    def worker_of(self, item: Segment | BackwardSegment | Value) -> Worker:
        """Returns the worker that runs it, or has it."""
        return self.settings.teams[item.stage].member(item.turn)

    def forward(self, segment: Segment, holds: bool, keeps: bool) -> ForwardWork:
        uses = {self.number_of_segment.get(value.segment, -1) for value in segment.inputs if value.segment}
        return ForwardWork(
            rank=self.queues[self.worker_of(segment)],
            micro_batch=self.positions[segment.graph.index],
            level=segment.level,
            uses=tuple(sorted(uses - {-1})),
            states=self.numbered([key for call in segment.calls for key in _states_of(call.target)]),
            gradients=self.numbered([("gradient of", value.gradient_of) for value in _gradients_in(segment)]),
            holds=holds,
            keeps=keeps,
            width=len(self.settings.teams[segment.stage].members),
        )

    def backward(self, part: BackwardSegment, releasing: Mapping[Segment, BackwardSegment]) -> BackwardWork:
        queue, segment = self.queues[self.worker_of(part)], part.segment
        return BackwardWork(
            rank=queue,
            micro_batch=self.positions[part.backward.graph.index],
            level=0 if segment is None else segment.level,
            forward=-1 if segment is None else self.number_of_segment.get(segment, -1),
            uses=tuple(
                sorted({self.number_of_part[edge.src] for edge in part.incoming if edge.src in self.number_of_part})
            ),
            accumulates=self.numbered(
                [*part.accumulates_into, *([segment] if segment in self.shared else []), *self.touched_by(part)]
            ),
            frees=segment is not None and releasing.get(segment) is part,
            is_worth_splitting=self.is_worth_splitting(part),
            feeds_another_rank=any(
                edge.dst not in self.number_of_part
                and edge.dst not in self.homes
                and self.queues[self.worker_of(edge.dst)] != queue
                for edge in part.outgoing
            ),
            width=len(self.settings.teams[part.stage].members),
        )

    def touched_by(self, part: BackwardSegment) -> list[object]:
        """Returns the gradients that `part` adds to and forwards of the step use."""
        if not self.touched:
            return []
        names = {
            name
            for key in part.accumulates_into
            for name in ([item.name for item in key.placed] if isinstance(key, ModuleTarget) else [whole_name(key)])
        }
        return [("gradient of", name) for name in self.touched if name in names]

    def numbered(self, keys: Iterable[object]) -> tuple[int, ...]:
        return tuple([self.keys.setdefault(key, len(self.keys)) for key in keys])

    def is_worth_splitting(self, part: BackwardSegment) -> bool:
        """Returns whether the weight gradients of this part are worth a task of their own."""
        if (
            part.backward.retain_graph
            or part.backward.requested is not None
            or not self.settings.teams[part.stage].owns
        ):
            return False
        calls = [call for call in part.calls if has_weights(call, self.trains)]
        flops, device = sum(call.entry.flops for call in calls), self.worker_of(part).device_type
        return bool(calls) and is_worth_splitting(flops, device, self.settings.least_weight_work_s)

    def connect(self, source: int, src: Worker, target: int, dst: Worker, item: Value | Edge) -> None:
        """`item` goes from task `source` of `src` to task `target` of `dst`; a message if these are of two ranks."""
        is_broadcast = isinstance(item, Value) and bool(item.name) and target in self.foreign
        channel = self.channels.between(src, dst, is_gradient=isinstance(item, Edge), of_parameters=is_broadcast)
        if channel is None:
            return
        if is_broadcast:
            assert isinstance(item, Value)
            self.broadcasts.add(item, channel, target, self.place)
            return
        if self.rank in (src.rank, dst.rank):
            self.items.setdefault((source, channel), {})[item] = None
        if self.rank == dst.rank:
            self.users.setdefault(channel, {}).setdefault(source, []).append(target)
            if isinstance(item, Value):
                self.num_users[item] = self.num_users.get(item, 0) + 1

    def arrival(self, part: BackwardSegment) -> Arrival:
        """Returns the arrival, at its owner, of a parameter's gradient that another task makes."""
        (edge,) = part.incoming
        src = self.worker_of(edge.src)
        channel = self.channels.between(src, self.worker_of(part), is_gradient=True, of_parameters=True)
        return Arrival(part, edge, self.tasks.backwards[self.number_of_part[edge.src]], src, channel)

    def lowered(self) -> tuple[Lowered, Objects]:
        tasks, orders, later = self.tasks.schedule.tasks, self.tasks.schedule.orders, self.reductions
        own = sorted({queue for worker, queue in self.queues.items() if worker.rank == self.rank})
        indices = [index for queue in own for index in orders[queue]]
        parts = [self.parts[self.tasks.work[index]] for index in indices if tasks[index].kind is not Kind.FORWARD]
        numbers = _Numbers([*parts, *(part for part, _ in later.here)])
        messages = self.messages(numbers)
        arriving = [key for key in later.messages if key[1].target.rank == self.rank]
        arriving.sort(key=lambda key: self.place[key[0]])  # the order in which the other side sends
        lowered = Lowered(
            actions=self.actions(indices, numbers, messages),
            messages=tuple(numbers.messages),
            prologue_sends=tuple(messages.sends[PROLOGUE]),
            prologue_receives=tuple(messages.receives[PROLOGUE]),
            reductions=tuple(
                [(numbers.parts[part], None if key is None else messages.beside[key]) for part, key in later.here]
            ),
            reduction_messages=tuple([messages.beside[key] for key in arriving]),
            late_reductions=later.late,
            is_summed=self.settings.gradient_reduction == "sum",
            carried=tuple([(numbers.edges[one], numbers.edges[next_one]) for one, next_one in later.carried.items()]),
            replicas=self.broadcasts.replicas,
            gpu_channels=self.channels.between_gpus,
            num_micro_batches=sum(number >= 0 for number in self.micro_batches),
            schedule=self.tasks.schedule,
        )
        for value, count in self.num_users.items():
            value.num_users = count
        objects = Objects(
            graphs=self.graphs,
            values=list(numbers.values),
            edges=list(numbers.edges),
            parts=list(numbers.parts)[: numbers.num_own],
            outlines=list(numbers.parts)[numbers.num_own :],
            released=[call for part in self.parts if not part.backward.retain_graph for call in part.calls],
            reaches=_reaches(self.parts),
        )
        for part in self.all_parts:
            if part not in numbers.parts and part.backward.stops is None:
                part.forget()
        return lowered, objects

    def messages(self, numbers: _Numbers) -> _Messages:
        """Which messages this rank sends and receives, and at which tasks."""
        tasks, orders, place = self.tasks.schedule.tasks, self.tasks.schedule.orders, self.place
        found = _Messages()
        number_of = {key: numbers.message(*key, items) for key, items in self.items.items()}
        for (task, channel), number in number_of.items():
            if channel.source.rank == self.rank:
                found.sends[task].append(number)
        for channel, users in self.users.items():
            order = orders[self.queues[channel.target]]
            if users.pop(PROLOGUE, None):
                found.receives[PROLOGUE].append(number_of[PROLOGUE, channel])
            for task, posted_at in as_sent(users, place, self.lookahead):
                found.receives[min(users[task], key=place.__getitem__)].append(number_of[task, channel])
                found.posts[order[posted_at]].append(number_of[task, channel])
        for channel, items, task in self.broadcasts.messages(place):
            if channel.source.rank == self.rank:
                found.sends[PROLOGUE].append(numbers.message(PROLOGUE, channel, items))
            elif channel.target.rank == self.rank:
                number = numbers.message(PROLOGUE, channel, items)
                found.receives[task].append(number)
                found.posts[orders[tasks[task].rank][0]].append(number)  # all at once: it has room for them
        for key, items in self.reductions.messages.items():
            number = found.beside[key] = numbers.message(*key, items)
            if key[1].source.rank == self.rank:
                found.sends[key[0]].append(number)
        return found

    def actions(self, indices: Sequence[int], numbers: _Numbers, messages: _Messages) -> tuple[ActionNote, ...]:
        tasks = self.tasks.schedule.tasks
        number_of = {index: number for number, index in enumerate(indices)}
        actions: list[ActionNote] = []
        for index in indices:
            task, number = tasks[index], self.tasks.work[index]
            segment = self.segments[number] if task.kind is Kind.FORWARD else None
            after = [need for need in task.needs if tasks[need].rank != task.rank and need in number_of]
            actions.append(
                ActionNote(
                    None if segment is not None else numbers.parts[self.parts[number]],
                    None if segment is None else (self.positions[segment.graph.index], segment.index),
                    task.kind,
                    self.micro_batches[task.micro_batch],
                    self.tasks.leaves_weights(index),
                    tuple(messages.receives[index]),
                    tuple(messages.posts[index]),
                    tuple(messages.sends[index]),
                    task.rank,
                    tuple([number_of[need] for need in after]),
                )
            )
        return tuple(actions)

    @functools.cached_property
    def micro_batches(self) -> list[int]:
        """Returns for each graph the number people know it by; -1 for what a loop computes beside its micro-batches."""
        parts = [part for part in self.parts if part.segment is not None and part.segment in self.number_of_segment]
        of_parameters = [part for part in parts if part.accumulates_into or part.sends_gradients]
        trained = {self.positions[part.segment.graph.index] for part in of_parameters or parts if part.segment}
        numbered = sorted(trained) if trained else range(len(self.positions))
        numbers = [-1] * len(self.positions)
        for number, position in enumerate(numbered):
            numbers[position] = number
        return numbers


def _routes(graphs: Sequence[Graph], settings: Settings) -> list[tuple[Backward, list[BackwardSegment]]]:
    released: set[Call] = set()
    routes: list[tuple[Backward, list[BackwardSegment]]] = []
    for backward in [backward for graph in graphs for backward in graph.backwards]:
        routes.append((backward, _parts_now(backward, settings, released)))
        if not backward.retain_graph:
            released.update(call for part in routes[-1][1] for call in part.calls)
    return routes


def _parts_now(backward: Backward, settings: Settings, released: Collection[Call]) -> list[BackwardSegment]:
    """Returns the parts of `backward` that run in this step: all, or those up to where its next hooks are called."""
    stops = backward.stops
    route_now = functools.partial(route, backward, settings.home_stages, released, part_stages=settings.part_stages)
    if stops is None:
        return route_now(keeps_order=settings.gradient_reduction == "exact")
    if not stops.has_begun:
        stops.begin(route_now())
    parts = stops.next_parts()
    stops.take(parts)
    return parts


def _gradients_in(segment: Segment) -> list[Value]:
    """Returns the gradients of parameters that a segment is given."""
    return [value for value in segment.inputs if value.is_gradient]


def _states_of(target: object) -> list[object]:
    """Returns what calls of `target` must find as the call before has left it."""
    if not isinstance(target, ModuleTarget):
        return []
    states: list[object] = [target] if target.has_buffers else []
    return states + [item.name for item in target.placed if item.is_written]


def has_weights(call: Call, trains: dict[object, bool]) -> bool:
    """Returns whether parameters get a gradient from `call`; `trains` keeps the result for the leaves found so far."""
    if not isinstance(call.target, ModuleTarget):
        assert call.arguments is not None
        return any(isinstance(item, Value) and bool(item.name) for item in call.arguments)
    known = trains.get(call.target)
    if known is None:
        stage = call.target.stage
        known = trains[call.target] = any(item.is_trained and item.stage == stage for item in call.target.placed)
    return known


def _reaches(parts: Iterable[BackwardSegment]) -> dict[int, int]:
    """Returns the values of `Program.reaches`."""
    reaches: dict[int, int] = {}
    for part in parts:
        last = part.backward.graph.index
        first = last if part.segment is None else part.segment.graph.index
        reaches[last] = min(first, reaches.get(last, last))
    return reaches


def _releasing(routes: Iterable[tuple[Backward, Sequence[BackwardSegment]]]) -> dict[Segment, BackwardSegment]:
    """Returns, for each segment whose forward and backward are in one micro-batch, the last of its parts.

    Until then it counts as one piece of memory. Others (a state that is carried on to the next micro-batch) do not
    count: the later micro-batch would need what the earlier one holds.
    """
    last = {part.segment: part for _, parts in routes for part in parts if part.segment is not None}
    return {segment: part for segment, part in last.items() if segment.graph is part.backward.graph}


@functools.lru_cache(maxsize=16)
def _scheduled(work: StepWork, name: str, num_ranks: int, run_ahead: int) -> StepTasks:
    """Returns the tasks in the order of every rank. Steps that look alike share them: finding the orders costs ranks x
    micro-batches, and so does keeping them.
    """
    return scheduled(work, name, num_ranks, run_ahead)


def lower(graphs: Sequence[Graph], settings: Settings) -> tuple[Lowered, Objects]:
    """Returns the program of a rank for a step, in numbers, and what these stand for.

    Args:
        graphs: All that was recorded and has not run, in order; members of wide stages have taken their turns.
        settings: Whose program, and how.
    """
    return _Builder(graphs, settings).lowered()


def _number(item: Any, numbers: dict[Any, int]) -> int:
    """Returns its number; the next one if it has none."""
    return numbers.setdefault(item, len(numbers))
