"""A rank's program, and the schedule of all ranks, made of recorded graphs.

Built from the recorded graphs alone, by the same pure functions on every rank: sender and receiver agree on every
message without exchanging a word.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence

from farspan.graph import EVERYWHERE, Backward, Call, Edge, Graph, ModuleTarget, Part, Segment, Value, route
from farspan.program.options import Settings
from farspan.program.program import PROLOGUE, Action, Message, Program
from farspan.schedule import (
    NOMINAL_S,
    Kind,
    Schedule,
    Task,
    is_worth_splitting,
    orders_by_name,
    run_ahead_of,
    split_from,
)

__all__ = ["build_program", "has_weights"]


class _Builder:
    def __init__(
        self,
        graphs: Sequence[Graph],
        routes: Sequence[tuple[Backward, list[Part]]],
        settings: Settings,
        *,
        split_from: int = 0,
    ) -> None:
        self.workers = [team.leader for team in settings.teams]
        self.rank = settings.rank
        self.least_weight_work_s = settings.least_weight_work_s
        self.split_from = split_from
        """The first micro-batch of which backwards may be split."""
        self.work: list[Segment | Part] = []
        self.tasks: list[Task] = []
        self.index_of: dict[Segment | Part, int] = {}
        self.messages: dict[tuple[int, int, int, bool], Message] = {}
        """What this rank sends and receives."""
        self.gpu_channels: set[tuple[int, int, int]] = set()
        self.last_use: dict[object, int] = {}
        """By leaf with buffers (running statistics), and by name of what leaves write: the task that used it last, in
        the loop's order.
        """
        self.num_users: dict[tuple[Value, int], int] = {}
        self.feeds_another_rank: set[Part] = set()
        """Backward work that another rank waits for, if only for what this rank makes of it."""
        self.trains: dict[object, bool] = {}
        """Of the leaves met, whether they have a parameter that is trained."""
        self.needed_by: dict[Message, list[int]] = {}
        positions = {graph.index: position for position, graph in enumerate(graphs)}
        with_backward = {backward.graph.index for backward, _ in routes}
        self.letting_go = _letting_go(routes)
        for graph in graphs:
            for segment in sorted(graph.segments, key=lambda segment: segment.order):
                self.add_forward(segment, positions[graph.index], graph.index in with_backward)
        last_touch: dict[object, tuple[int, ...]] = {}
        for backward, parts in routes:
            self.note_awaited(parts)
            for part in parts:
                self.add_backward(part, positions[backward.graph.index], last_touch)

    def add(
        self,
        work: Segment | Part,
        kind: Kind,
        micro_batch: int,
        needs: Iterable[int],
        duration: float,
        *,
        level: int = 0,
        holds: bool = False,
        memory: float = 0.0,
    ) -> int:
        index = len(self.tasks)
        self.work.append(work)
        self.tasks.append(
            Task(
                kind=kind,
                rank=self.workers[work.stage].rank,
                micro_batch=micro_batch,
                level=level,
                duration=duration,
                needs=tuple(sorted(needs)),
                holds=holds,
                memory=memory,
            )
        )
        return index

    def add_forward(self, segment: Segment, micro_batch: int, holds: bool) -> None:
        sources = [(value, self.index_of.get(value.segment) if value.segment else None) for value in segment.inputs]
        needs = {index for _, index in sources if index is not None}
        stateful = [key for call in segment.calls for key in _states_of(call.target)]
        needs.update(self.last_use[leaf] for leaf in stateful if leaf in self.last_use)
        task = self.add(
            segment,
            Kind.FORWARD,
            micro_batch,
            needs,
            NOMINAL_S,
            level=segment.level,
            holds=holds,
            memory=float(segment in self.letting_go),
        )
        self.index_of[segment] = task
        self.last_use.update(dict.fromkeys(stateful, task))
        for value, index in sources:
            if value.stage == EVERYWHERE:
                continue
            self.connect(PROLOGUE if index is None else index, value.stage, task, value, is_gradient=False)

    def add_backward(self, part: Part, micro_batch: int, last_touch: dict[object, tuple[int, ...]]) -> None:
        needs = {self.index_of[edge.src] for edge in part.incoming if edge.src in self.index_of}
        if part.segment is not None and part.segment in self.index_of:
            needs.add(self.index_of[part.segment])
        before = [last_touch[key] for key in part.touches if key in last_touch]
        level = 0 if part.segment is None else part.segment.level
        memory = -1.0 if part.segment is not None and self.letting_go.get(part.segment) is part else 0.0
        if micro_batch >= self.split_from and self.is_split(part):
            needs.update(tasks[0] for tasks in before)
            task = self.add(part, Kind.BACKWARD, micro_batch, needs, NOMINAL_S, level=level)
            self.index_of[part] = task
            needs = {task, *(tasks[-1] for tasks in before)}
            weight = self.add(part, Kind.WEIGHT, micro_batch, needs, NOMINAL_S, level=level, memory=memory)
            touched = (task, weight)
        else:
            needs.update(tasks[-1] for tasks in before)
            task = self.add(part, Kind.BACKWARD, micro_batch, needs, 2 * NOMINAL_S, level=level, memory=memory)
            self.index_of[part] = task
            touched = (task,)
        for key in part.touches:
            last_touch[key] = touched
        for edge in part.incoming:
            source = self.index_of.get(edge.src, PROLOGUE)  # what an earlier flush has computed
            self.connect(source, edge.src.stage, task, edge, is_gradient=True)

    def note_awaited(self, parts: Sequence[Part]) -> None:
        for part in reversed(parts):
            rank = self.workers[part.stage].rank
            if any(
                self.workers[edge.dst.stage].rank != rank or edge.dst in self.feeds_another_rank
                for edge in part.outgoing
            ):
                self.feeds_another_rank.add(part)

    def is_split(self, part: Part) -> bool:
        """Whether another rank waits for this part, and its weight gradients are worth a task of their own."""
        worker = self.workers[part.stage]
        if part.backward.retain_graph or part.backward.wanted is not None or part not in self.feeds_another_rank:
            return False
        calls = [call for call in part.calls if has_weights(call, self.trains)]
        flops = sum(call.entry.flops for call in calls)
        return bool(calls) and is_worth_splitting(flops, worker.device_type, self.least_weight_work_s)

    def connect(self, source: int, source_stage: int, target: int, item: Value | Edge, *, is_gradient: bool) -> None:
        """`item` goes from task `source` to task `target`; a message if they lie on different ranks."""
        worker, stage = self.workers[source_stage], self.work[target].stage
        src, dst = worker.rank, self.tasks[target].rank
        if src == dst:
            return
        is_between_gpus = worker.device_type == self.workers[stage].device_type == "cuda"
        if is_between_gpus:
            self.gpu_channels.add((src, dst, int(is_gradient)))
        if self.rank not in (src, dst):
            return
        key = (source, src, dst, is_gradient)
        message = self.messages.get(key)
        if message is None:
            message = self.messages[key] = Message(source, src, dst, is_gradient=is_gradient)
            message.stage = stage
            message.is_between_gpus = is_between_gpus
            self.needed_by[message] = []
        message.items[item] = None
        if isinstance(item, Value):
            self.num_users[item, dst] = self.num_users.get((item, dst), 0) + 1
        self.needed_by[message].append(target)

    def program(self, schedule: Schedule, lookahead: int, num_graphs: int) -> Program:
        rank, orders = self.rank, schedule.orders
        place = {task: position for order in orders for position, task in enumerate(order)}
        place[PROLOGUE] = -1
        numbers = self._micro_batch_numbers(num_graphs)
        actions = [self.action(index, numbers) for index in orders[rank]]
        prologue_sends: list[Message] = []
        prologue_receives: list[Message] = []
        channels: dict[tuple[int, bool], list[Message]] = {}
        for message in self.messages.values():
            if message.src == rank:
                (prologue_sends if message.task == PROLOGUE else actions[place[message.task]].sends).append(message)
            if message.dst == rank:
                for item in message.items:
                    if isinstance(item, Value):
                        item.num_users = self.num_users[item, rank]
                channels.setdefault((message.src, message.is_gradient), []).append(message)
                if message.task == PROLOGUE:
                    prologue_receives.append(message)
        for channel in channels.values():
            channel.sort(key=lambda message: place[message.task])  # the order in which the other side sends
            posted_by = len(actions)
            for message in reversed(channel):
                first = min(place[target] for target in self.needed_by[message])
                if message.task != PROLOGUE:
                    actions[first].receives.append(message)
                posted_by = min(posted_by, first)
                if message.task != PROLOGUE:
                    actions[max(0, posted_by - lookahead)].posts.append(message)
        for action in actions:
            action.posts.reverse()  # within a channel, back to the order of sending
            action.receives.reverse()
        parts = [work for work in self.index_of if isinstance(work, Part)]
        return Program(
            actions=actions,
            prologue_sends=prologue_sends,
            prologue_receives=prologue_receives,
            reaches=_reaches(parts),
            released=[call for part in parts if not part.backward.retain_graph for call in part.calls],
            parts=parts,
            gpu_channels=self.gpu_channels,
            num_micro_batches=sum(number >= 0 for number in numbers),
            schedule=schedule,
        )

    def action(self, index: int, numbers: Sequence[int]) -> Action:
        task = self.tasks[index]
        following = self.tasks[index + 1] if index + 1 < len(self.tasks) else task
        is_split = task.kind is Kind.BACKWARD and following.kind is Kind.WEIGHT
        return Action(self.work[index], task.kind, numbers[task.micro_batch], leaves_weights=is_split)

    def _micro_batch_numbers(self, num_graphs: int) -> list[int]:
        """For each graph the number people know it by; -1 for what a loop computes beside its micro-batches."""
        trained = {
            self.tasks[self.index_of[part.segment]].micro_batch
            for part in self.index_of
            if isinstance(part, Part) and part.segment in self.index_of
        }
        numbered = sorted(trained) if trained else range(num_graphs)
        numbers = [-1] * num_graphs
        for number, position in enumerate(numbered):
            numbers[position] = number
        return numbers


def _routes(graphs: Sequence[Graph], settings: Settings) -> list[tuple[Backward, list[Part]]]:
    released: set[Call] = set()
    routes: list[tuple[Backward, list[Part]]] = []
    for backward in [backward for graph in graphs for backward in graph.backwards]:
        routes.append((backward, _parts_now(backward, settings.home_stages, released)))
        if not backward.retain_graph:
            released.update(call for part in routes[-1][1] for call in part.calls)
    return routes


def _parts_now(backward: Backward, home_stages: Sequence[int], released: Collection[Call]) -> list[Part]:
    """The parts of `backward` that run in this step: all, or those up to where its next hooks are called."""
    stops = backward.stops
    if stops is None:
        return route(backward, home_stages, released)
    if not stops.has_begun:
        stops.begin(route(backward, home_stages, released))
    parts = stops.next_parts()
    stops.take(parts)
    return parts


def _states_of(target: object) -> list[object]:
    """What calls of `target` must find as the call before has left it."""
    if not isinstance(target, ModuleTarget):
        return []
    states: list[object] = [target] if target.has_buffers else []
    return states + [item.name for item in target.placed if item.is_written]


def has_weights(call: Call, trains: dict[object, bool]) -> bool:
    """Whether parameters get a gradient from `call`; `trains` keeps the answer for the leaves that were met."""
    if not isinstance(call.target, ModuleTarget):
        assert call.arguments is not None
        return any(isinstance(item, Value) and bool(item.name) for item in call.arguments)
    known = trains.get(call.target)
    if known is None:
        known = trains[call.target] = any(item.is_trained for item in call.target.placed)
    return known


def _reaches(parts: Iterable[Part]) -> dict[int, int]:
    """See `Program.reaches`."""
    reaches: dict[int, int] = {}
    for part in parts:
        last = part.backward.graph.index
        first = last if part.segment is None else part.segment.graph.index
        reaches[last] = min(first, reaches.get(last, last))
    return reaches


def _letting_go(routes: Iterable[tuple[Backward, Sequence[Part]]]) -> dict[Segment, Part]:
    """For each segment whose forward and backward are in one micro-batch, the last of its parts.

    Until then it counts as one piece of memory. Others (a state that is carried on to the next micro-batch) do not
    count: the later micro-batch would need what the earlier one holds.
    """
    last = {part.segment: part for _, parts in routes for part in parts if part.segment is not None}
    return {segment: part for segment, part in last.items() if segment.graph is part.backward.graph}


@functools.lru_cache(maxsize=16)
def _split_from(schedule: str, tasks: tuple[Task, ...], num_ranks: int, run_ahead: int) -> int:
    return split_from(schedule, tasks, num_ranks, run_ahead=run_ahead)


@functools.lru_cache(maxsize=16)
def _schedule(name: str, tasks: tuple[Task, ...], num_ranks: int, run_ahead: int) -> Schedule:
    """The tasks in the order of every rank. Steps that look alike share it: finding it costs ranks x micro-batches, and
    so does keeping it.
    """
    orders = orders_by_name(name, tasks, num_ranks, run_ahead=run_ahead)
    return Schedule(tasks=tasks, orders=tuple(map(tuple, orders)))


def build_program(graphs: Sequence[Graph], settings: Settings) -> Program:
    """Turn recorded graphs into the program of a rank.

    Args:
        graphs: All that was recorded and has not run, in order.
        settings: Whose program, and how.
    """
    routes = _routes(graphs, settings)
    builder = _Builder(graphs, routes, settings)
    run_ahead = run_ahead_of(settings.schedule, settings.lookahead)
    first = _split_from(settings.schedule, tuple(builder.tasks), settings.num_ranks, run_ahead)
    if first:
        builder = _Builder(graphs, routes, settings, split_from=first)
    schedule = _schedule(settings.schedule, tuple(builder.tasks), settings.num_ranks, run_ahead)
    return builder.program(schedule, settings.lookahead - run_ahead, len(graphs))
