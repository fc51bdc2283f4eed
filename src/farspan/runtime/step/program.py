"""What one rank does in one step: its tasks in order, and for every channel the order of its messages.

Built from the recorded graphs alone, by the same pure functions on every rank: sender and receiver agree on every
message without exchanging a word.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from farspan.graph import Call, Edge, Graph, Part, Segment, Value, route
from farspan.schedule import Kind, Task, list_schedule

__all__ = ["Bundle", "Program", "Step", "build_program"]

_FORWARD_COST, _BACKWARD_COST = 1.0, 2.0
_PROLOGUE = -1


class Bundle:
    """The tensors that one task sends to one rank: one message (or a few, if they are large)."""

    __slots__ = (
        "dst",
        "is_between_gpus",
        "is_gradient",
        "items",
        "src",
        "stage",
        "strides",
        "task",
        "tensors",
        "works",
    )

    def __init__(self, task: int, src: int, dst: int, *, is_gradient: bool) -> None:
        self.task = task
        """The sending task's index; -1 for what is sent before the first task."""
        self.src = src
        self.dst = dst
        self.stage = -1
        """The stage that receives, and so the device."""
        self.is_gradient = is_gradient
        self.is_between_gpus = False
        self.items: dict[Value | Edge, None] = {}
        self.tensors: list[Any] = []
        self.strides: Any = None
        """Of the tensors, as they come with them."""
        self.works: list[Any] = []

    def describe(self) -> str:
        return ", ".join(item.describe() for item in self.items)


@dataclass(slots=True)
class Step:
    """One task of this rank, with its messages."""

    work: Segment | Part
    micro_batch: int
    """Its number, from 0; -1 for what belongs to none."""
    receives: list[Bundle] = field(default_factory=list)
    """Must have arrived before the task runs."""
    posts: list[Bundle] = field(default_factory=list)
    """Receives to post before the task runs: its own, those of the next `lookahead` tasks, and all before them."""
    sends: list[Bundle] = field(default_factory=list)

    @property
    def kind(self) -> Kind:
        return Kind.FORWARD if isinstance(self.work, Segment) else Kind.BACKWARD


@dataclass(slots=True)
class Program:
    """One rank's part of a step."""

    steps: list[Step]
    prologue_sends: list[Bundle]
    prologue_receives: list[Bundle]
    parts: list[Part]
    """All backward work of the step, of every rank."""
    gpu_channels: set[tuple[int, int, int]]
    """(source, destination, channel) of everything that goes from one GPU to another, on all ranks."""
    num_micro_batches: int


class _Builder:
    def __init__(
        self, graphs: Sequence[Graph], rank_of: Sequence[int], num_ranks: int, is_on_gpu: Sequence[bool]
    ) -> None:
        self.rank_of = rank_of
        self.is_on_gpu = is_on_gpu
        self.num_ranks = num_ranks
        self.work: list[Segment | Part] = []
        self.tasks: list[Task] = []
        self.index_of: dict[Segment | Part, int] = {}
        self.bundles: dict[tuple[int, int, int, bool], Bundle] = {}
        self.last_use: dict[object, int] = {}
        """For leaves with buffers (running statistics): the task that used them last, in the loop's order."""
        self.num_users: dict[tuple[Value, int], int] = {}
        self.needed_by: dict[Bundle, list[int]] = {}
        backwards = [backward for graph in graphs for backward in graph.backwards]
        positions = {graph.index: position for position, graph in enumerate(graphs)}
        with_backward = {backward.graph.index for backward in backwards}
        for graph in graphs:
            for segment in sorted(graph.segments, key=lambda segment: segment.order):
                self.add_forward(segment, positions[graph.index], graph.index in with_backward)
        last_touch: dict[object, int] = {}
        released: set[Call] = set()
        for backward in backwards:
            for part in route(backward, released):
                self.add_backward(part, positions[backward.graph.index], last_touch)
                if not backward.retain_graph:
                    released.update(part.calls)

    def add(self, work: Segment | Part, kind: Kind, micro_batch: int, level: int, needs: set[int], holds: bool) -> int:
        index = len(self.tasks)
        self.index_of[work] = index
        self.work.append(work)
        self.tasks.append(
            Task(
                kind=kind,
                rank=self.rank_of[work.stage],
                micro_batch=micro_batch,
                level=level,
                duration=_FORWARD_COST if kind is Kind.FORWARD else _BACKWARD_COST,
                needs=tuple(sorted(needs)),
                holds=holds,
            )
        )
        return index

    def add_forward(self, segment: Segment, micro_batch: int, holds: bool) -> None:
        sources = [(value, self.index_of.get(value.segment) if value.segment else None) for value in segment.inputs]
        needs = {index for _, index in sources if index is not None}
        stateful = [call.target for call in segment.calls if getattr(call.target, "has_buffers", False)]
        needs.update(self.last_use[leaf] for leaf in stateful if leaf in self.last_use)
        task = self.add(segment, Kind.FORWARD, micro_batch, segment.level, needs, holds)
        self.last_use.update(dict.fromkeys(stateful, task))
        for value, index in sources:
            self.connect(_PROLOGUE if index is None else index, value.stage, task, value, is_gradient=False)

    def add_backward(self, part: Part, micro_batch: int, last_touch: dict[object, int]) -> None:
        needs = {self.index_of[edge.src] for edge in part.incoming}
        if part.segment is not None and part.segment in self.index_of:
            needs.add(self.index_of[part.segment])
        needs.update(last_touch[key] for key in part.touches if key in last_touch)
        task = self.add(part, Kind.BACKWARD, micro_batch, 0, needs, False)
        for key in part.touches:
            last_touch[key] = task
        for edge in part.incoming:
            self.connect(self.index_of[edge.src], edge.src.stage, task, edge, is_gradient=True)

    def connect(self, source: int, source_stage: int, target: int, item: Value | Edge, *, is_gradient: bool) -> None:
        """`item` goes from task `source` to task `target`; a message if they lie on different ranks."""
        src, dst = self.rank_of[source_stage], self.tasks[target].rank
        if src == dst:
            return
        key = (source, src, dst, is_gradient)
        bundle = self.bundles.get(key)
        if bundle is None:
            bundle = self.bundles[key] = Bundle(source, src, dst, is_gradient=is_gradient)
            bundle.stage = self.work[target].stage
            bundle.is_between_gpus = self.is_on_gpu[source_stage] and self.is_on_gpu[bundle.stage]
            self.needed_by[bundle] = []
        bundle.items[item] = None
        if isinstance(item, Value):
            self.num_users[item, dst] = self.num_users.get((item, dst), 0) + 1
        self.needed_by[bundle].append(target)

    def program_of(self, rank: int, orders: Sequence[Sequence[int]], lookahead: int, num_graphs: int) -> Program:
        place = {task: position for order in orders for position, task in enumerate(order)}
        place[_PROLOGUE] = -1
        numbers = self._micro_batch_numbers(num_graphs)
        steps = [Step(self.work[index], numbers[self.tasks[index].micro_batch]) for index in orders[rank]]
        prologue_sends: list[Bundle] = []
        prologue_receives: list[Bundle] = []
        channels: dict[tuple[int, bool], list[Bundle]] = {}
        for bundle in self.bundles.values():
            if bundle.src == rank:
                (prologue_sends if bundle.task == _PROLOGUE else steps[place[bundle.task]].sends).append(bundle)
            if bundle.dst == rank:
                for item in bundle.items:
                    if isinstance(item, Value):
                        item.num_users = self.num_users[item, rank]
                channels.setdefault((bundle.src, bundle.is_gradient), []).append(bundle)
                if bundle.task == _PROLOGUE:
                    prologue_receives.append(bundle)
        for channel in channels.values():
            channel.sort(key=lambda bundle: place[bundle.task])  # the order in which the other side sends
            posted_by = len(steps)
            for bundle in reversed(channel):
                first = min(place[target] for target in self.needed_by[bundle])
                if bundle.task != _PROLOGUE:
                    steps[first].receives.append(bundle)
                posted_by = min(posted_by, first)
                if bundle.task != _PROLOGUE:
                    steps[max(0, posted_by - lookahead)].posts.append(bundle)
        for step in steps:
            step.posts.reverse()  # within a channel, back to the order of sending
            step.receives.reverse()
        parts = [work for work in self.work if isinstance(work, Part)]
        gpu_channels = {
            (bundle.src, bundle.dst, int(bundle.is_gradient))
            for bundle in self.bundles.values()
            if bundle.is_between_gpus
        }
        num_micro_batches = sum(number >= 0 for number in numbers)
        return Program(steps, prologue_sends, prologue_receives, parts, gpu_channels, num_micro_batches)

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


@functools.lru_cache(maxsize=16)
def _order(tasks: tuple[Task, ...], num_ranks: int, run_ahead: int) -> list[list[int]]:
    """The order of every rank's tasks. Steps that look alike share it: finding it costs ranks x micro-batches."""
    return list_schedule(tasks, num_ranks, run_ahead=run_ahead)


def build_program(
    graphs: Sequence[Graph],
    *,
    rank_of: Sequence[int],
    rank: int,
    num_ranks: int,
    lookahead: int,
    is_on_gpu: Sequence[bool] | None = None,
) -> Program:
    """Turn recorded graphs into the program of `rank`.

    Args:
        graphs: All that was recorded and has not run, in order.
        rank_of: The rank of each stage.
        is_on_gpu: For each stage, whether it runs on a GPU.
        rank: Whose program.
        num_ranks: How many ranks there are.
        lookahead: How many boundary buffers a rank may hold beyond one for each stage, to hide transfers: one for a
            forward more than 1F1B has in flight, the others for receives that are posted so many tasks ahead.
    """
    builder = _Builder(graphs, rank_of, num_ranks, is_on_gpu or [False] * len(rank_of))
    run_ahead = min(1, lookahead // 2)
    orders = _order(tuple(builder.tasks), num_ranks, run_ahead)
    return builder.program_of(rank, orders, lookahead - run_ahead, len(graphs))
