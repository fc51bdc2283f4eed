"""A rank's program, and the schedule of all ranks, made of recorded graphs.

Built from the recorded graphs alone, by the same pure functions on every rank: sender and receiver agree on every
message without exchanging a word.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence

from farspan.graph import EVERYWHERE, Backward, BackwardSegment, Call, Edge, Graph, ModuleTarget, Segment, Value, route
from farspan.plan import Worker
from farspan.program.beside import Arrival, Broadcasts, Reductions, apart, late_names
from farspan.program.options import Settings
from farspan.program.program import PROLOGUE, Action, Channel, Message, Program
from farspan.program.route import Channels, queues_of, take_turns
from farspan.program.tasks import BackwardWork, ForwardWork, StepTasks, StepWork, scheduled
from farspan.schedule import Kind, is_worth_splitting, run_ahead_of

__all__ = ["build_program", "has_weights"]


class _Builder:
    def __init__(
        self, graphs: Sequence[Graph], routes: Sequence[tuple[Backward, list[BackwardSegment]]], settings: Settings
    ) -> None:
        self.queues = queues_of(settings.teams, settings.num_ranks)
        self.settings = settings
        self.rank = settings.rank
        self.channels = Channels(settings.teams)
        self.messages: dict[tuple[int, Channel], Message] = {}
        """Messages that this rank sends and receives, by the task that sends them."""
        self.gpu_channels: set[Channel] = set()
        self.num_users: dict[tuple[Value, int], int] = {}
        self.trains: dict[object, bool] = {}
        """For each leaf so far, whether it has a parameter that is trained."""
        self.needed_by: dict[Message, list[int]] = {}
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
        self.number_of_segment = {segment: number for number, segment in enumerate(self.segments)}
        self.number_of_part = {part: number for number, part in enumerate(self.parts)}
        self.wide = {number for number, each in enumerate(self.segments) if settings.teams[each.stage].is_wide}
        """Forwards of wide stages."""
        with_backward = {backward.graph.index for backward, _ in routes}
        releasing = _releasing(routes)
        run_ahead = run_ahead_of(settings.schedule, settings.lookahead)
        work = StepWork(
            tuple([self.forward(each, each.graph.index in with_backward, each in releasing) for each in self.segments]),
            tuple([self.backward(part, releasing) for part in self.parts]),
        )
        num_queues = max([settings.num_ranks - 1, *self.queues.values()]) + 1
        self.tasks = _scheduled(work, settings.schedule, num_queues, run_ahead)
        self.place = {task: place for order in self.tasks.schedule.orders for place, task in enumerate(order)}
        self.place[PROLOGUE] = -1
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
            accumulates=self.numbered(part.accumulates_into),
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

    def numbered(self, keys: Iterable[object]) -> tuple[int, ...]:
        return tuple([self.keys.setdefault(key, len(self.keys)) for key in keys])

    def is_worth_splitting(self, part: BackwardSegment) -> bool:
        """Returns whether the weight gradients of this part are worth a task of their own."""
        if part.backward.retain_graph or part.backward.requested is not None:
            return False
        calls = [call for call in part.calls if has_weights(call, self.trains)]
        flops, device = sum(call.entry.flops for call in calls), self.worker_of(part).device_type
        return bool(calls) and is_worth_splitting(flops, device, self.settings.least_weight_work_s)

    def connect(self, source: int, src: Worker, target: int, dst: Worker, item: Value | Edge) -> None:
        """`item` goes from task `source` of `src` to task `target` of `dst`; a message if these are of two ranks."""
        if src.rank == dst.rank:
            return
        is_broadcast = isinstance(item, Value) and bool(item.name) and target in self.wide
        channel = self.channels.between(src, dst, is_gradient=isinstance(item, Edge), of_parameters=is_broadcast)
        if channel.is_between_gpus:
            self.gpu_channels.add(channel)
        if is_broadcast:
            assert isinstance(item, Value)
            self.broadcasts.add(item, channel, target, self.place)
            return
        if self.rank not in (src.rank, dst.rank):
            return
        message = self.messages.get((source, channel))
        if message is None:
            message = self.messages[source, channel] = Message(source, channel)
            self.needed_by[message] = []
        message.items[item] = None
        if isinstance(item, Value):
            self.num_users[item, dst.rank] = self.num_users.get((item, dst.rank), 0) + 1
        self.needed_by[message].append(target)

    def arrival(self, part: BackwardSegment) -> Arrival:
        """Returns the arrival, at its owner, of a parameter's gradient that another task makes."""
        (edge,) = part.incoming
        src, dst, channel = self.worker_of(edge.src), self.worker_of(part), None
        if src.rank != dst.rank:
            channel = self.channels.between(src, dst, is_gradient=True, of_parameters=True)
            if channel.is_between_gpus:
                self.gpu_channels.add(channel)
        return Arrival(part, edge, self.tasks.backwards[self.number_of_part[edge.src]], src, channel)

    def program(self) -> Program:
        rank, tasks, orders = self.rank, self.tasks.schedule.tasks, self.tasks.schedule.orders
        own = sorted({queue for worker, queue in self.queues.items() if worker.rank == rank})
        place = self.place
        numbers = self._micro_batch_numbers()
        action_of = {index: self.action(index, numbers) for queue in own for index in orders[queue]}
        actions = list(action_of.values())
        prologue_sends: list[Message] = []
        prologue_receives: list[Message] = []
        channels: dict[Channel, list[Message]] = {}
        for message in self.messages.values():
            if message.src == rank:
                (prologue_sends if message.task == PROLOGUE else action_of[message.task].sends).append(message)
            else:
                for item in message.items:
                    if isinstance(item, Value):
                        item.num_users = self.num_users[item, rank]
                channels.setdefault(message.channel, []).append(message)
                if message.task == PROLOGUE:
                    prologue_receives.append(message)
        for channel in channels.values():
            channel.sort(key=lambda message: place[message.task])  # the order in which the other side sends
            order = orders[tasks[self.needed_by[channel[0]][0]].rank]
            posted_by = len(order)
            for message in reversed(channel):
                first = min(place[target] for target in self.needed_by[message])
                if message.task != PROLOGUE:
                    action_of[order[first]].receives.append(message)
                posted_by = min(posted_by, first)
                if message.task != PROLOGUE:
                    action_of[order[max(0, posted_by - self.lookahead)]].posts.append(message)
        for action in actions:
            action.posts.reverse()  # within a channel, back to the order of sending
            action.receives.reverse()
        for message, task in self.broadcasts.messages(place):
            if message.src == rank:
                prologue_sends.append(message)
            elif message.dst == rank:
                action_of[task].receives.append(message)
                action_of[orders[tasks[task].rank][0]].posts.append(message)  # all at once: it has room for them
        for message in self.reductions.messages.values():
            if message.src == rank:
                action_of[message.task].sends.append(message)
        if len(own) > 1:
            for index, action in action_of.items():
                needs = [need for need in tasks[index].needs if tasks[need].rank != action.queue]
                action.after = [action_of[need] for need in needs if need in action_of]
        return Program(
            actions=actions,
            prologue_sends=prologue_sends,
            prologue_receives=prologue_receives,
            reductions=self.reductions.here,
            reduction_messages=self.reductions.received(place),
            late_reductions=self.reductions.late,
            is_summed=self.settings.gradient_reduction == "sum",
            carried=self.reductions.carried,
            replicas=self.broadcasts.replicas,
            reaches=_reaches(self.parts),
            released=[call for part in self.parts if not part.backward.retain_graph for call in part.calls],
            parts=self.all_parts,
            gpu_channels=self.gpu_channels,
            num_micro_batches=sum(number >= 0 for number in numbers),
            schedule=self.tasks.schedule,
        )

    def action(self, index: int, numbers: Sequence[int]) -> Action:
        task, number = self.tasks.schedule.tasks[index], self.tasks.work[index]
        work = self.segments[number] if task.kind is Kind.FORWARD else self.parts[number]
        leaves_weights, number = self.tasks.leaves_weights(index), numbers[task.micro_batch]
        return Action(work, task.kind, number, leaves_weights=leaves_weights, queue=task.rank)

    def _micro_batch_numbers(self) -> list[int]:
        """Returns for each graph the number people know it by; -1 for what a loop computes beside its micro-batches."""
        trained = {
            self.positions[part.segment.graph.index]
            for part in self.parts
            if part.segment is not None and part.segment in self.number_of_segment
        }
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
    if stops is None:
        keeps_order = settings.gradient_reduction == "exact"
        return route(backward, settings.home_stages, released, keeps_order=keeps_order)
    if not stops.has_begun:
        stops.begin(route(backward, settings.home_stages, released))
    parts = stops.next_parts()
    stops.take(parts)
    return parts


def _states_of(target: object) -> list[object]:
    """Returns what calls of `target` must find as the call before has left it."""
    if not isinstance(target, ModuleTarget):
        return []
    states: list[object] = [target] if target.has_buffers else []
    return states + [item.name for item in target.placed if item.is_written]


def has_weights(call: Call, trains: dict[object, bool]) -> bool:
    """Returns whether parameters get a gradient from `call`; `trains` keeps the answer for the leaves so far."""
    if not isinstance(call.target, ModuleTarget):
        assert call.arguments is not None
        return any(isinstance(item, Value) and bool(item.name) for item in call.arguments)
    known = trains.get(call.target)
    if known is None:
        stage = call.target.stage
        known = trains[call.target] = any(item.is_trained and item.stage == stage for item in call.target.placed)
    return known


def _reaches(parts: Iterable[BackwardSegment]) -> dict[int, int]:
    """See `Program.reaches`."""
    reaches: dict[int, int] = {}
    for part in parts:
        last = part.backward.graph.index
        first = last if part.segment is None else part.segment.graph.index
        reaches[last] = min(first, reaches.get(last, last))
    return reaches


def _releasing(routes: Iterable[tuple[Backward, Sequence[BackwardSegment]]]) -> dict[Segment, BackwardSegment]:
    """Maps each segment whose forward and backward are in one micro-batch to the last of its backward segments.

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


def build_program(graphs: Sequence[Graph], settings: Settings) -> Program:
    """Turn recorded graphs into the program of a rank.

    Args:
        graphs: All that was recorded and has not run, in order.
        settings: Whose program, and how.
    """
    take_turns(graphs, settings.teams)
    return _Builder(graphs, _routes(graphs, settings), settings).program()
