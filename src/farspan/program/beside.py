"""Moves values and gradients of parameters between their owners and the members of wide stages, beside the tasks of a
step.

    owner     w ----------------------- before the step ----->  member       w, until the parameter changes
    owner     w.grad += g0, += g1, ..   <--- when it is there ---  member    g of each of its micro-batches

The first task that uses a value waits for it. A gradient is added in the loop's order, as it arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from farspan.graph import BackwardSegment, Edge, Graph, Value, whole_name
from farspan.plan import Worker
from farspan.program.program import Channel

__all__ = ["Arrival", "Broadcasts", "Reductions", "apart", "late_names"]


def apart(
    parts: Sequence[BackwardSegment], *, keeps_order: bool
) -> tuple[list[BackwardSegment], list[BackwardSegment]]:
    """Returns the backward segments that are tasks, and those that merely bring a parameter's gradient to its owner.

    Where a gradient is returned or seen by hooks before it is added, all of that is tasks; also where segments on the
    owner add to the same gradient, in the loop's order.
    """
    native: set[str] = set()
    if keeps_order:
        keys = [key for part in parts if part.segment for key in part.accumulates_into if isinstance(key, str)]
        native.update(map(whole_name, keys))
    tasks: list[BackwardSegment] = []
    homes: list[BackwardSegment] = []
    for part in parts:
        is_home = part.segment is None and part.stop is None and part.backward.stops is None
        key = part.incoming[0].key if is_home and part.backward.requested is None else None
        (homes if isinstance(key, str) and whole_name(key) not in native else tasks).append(part)
    return tasks, homes


def late_names(graphs: Iterable[Graph], tasks: Iterable[BackwardSegment]) -> frozenset[str] | None:
    """Returns the parameters to which tasks add gradient; None, for all, if the step takes gradients as they are before
    it."""
    if any(value.gradient_of for graph in graphs for value in graph.sources):
        return None
    return frozenset([whole_name(key) for part in tasks for key in part.accumulates_into if isinstance(key, str)])


class Broadcasts:
    """The values of parameters that members of wide stages need."""

    def __init__(self, known: frozenset[tuple[str, Worker]]) -> None:
        self.known = known
        """Parameters that members have from an earlier step."""
        self._first_user: dict[Channel, dict[Value, int]] = {}

    def add(self, value: Value, channel: Channel, task: int, place: Mapping[int, int]) -> None:
        """A task at the end of `channel` uses `value`."""
        if (value.name, channel.target) in self.known:
            return
        users = self._first_user.setdefault(channel, {})
        first = users.get(value, task)
        users[value] = min(task, first, key=place.__getitem__)

    @property
    def replicas(self) -> frozenset[tuple[str, Worker]]:
        """Returns what they get in this step."""
        return frozenset(
            [(value.name, channel.target) for channel, users in self._first_user.items() for value in users]
        )

    def messages(self, place: Mapping[int, int]) -> list[tuple[Channel, list[Value], int]]:
        """Returns each with the task that waits for it; those of a channel in the order in which they are needed."""
        found: list[tuple[Channel, list[Value], int]] = []
        for channel, users in self._first_user.items():
            by_task: dict[int, list[Value]] = {}
            for value, task in sorted(users.items(), key=lambda entry: place[entry[1]]):
                by_task.setdefault(task, []).append(value)
            found += [(channel, values, task) for task, values in by_task.items()]
        return found


class Arrival(NamedTuple):
    """A gradient that arrives at the owner of its parameter."""

    part: BackwardSegment
    edge: Edge
    task: int
    """The task that makes it."""
    worker: Worker
    """The worker that runs this task."""
    channel: Channel | None
    """The channel to the owner; None if that is the same rank."""


class Reductions:
    """The gradients of parameters that arrive at one rank, or leave it.

    Args:
        rank: Which.
        late: The parameters of which they wait for the end of the step; None for all.
    """

    def __init__(self, rank: int, *, late: frozenset[str] | None) -> None:
        self.rank = rank
        self.here: list[tuple[BackwardSegment, tuple[int, Channel] | None]] = []
        """Each with the message that brings it; None where it is made on this rank."""
        self.messages: dict[tuple[int, Channel], list[Edge]] = {}
        """By the task that sends it, and the way it takes."""
        self.carried: dict[Edge, Edge] = {}
        self._late = late

    def carry(self, arrivals: Iterable[Arrival], place: Mapping[int, int]) -> list[Arrival]:
        """Let those of each worker be added up there, in its order; returns what arrives then, one for each worker."""
        by_worker: dict[tuple[Any, Worker], list[Arrival]] = {}
        for arrival in arrivals:
            by_worker.setdefault((arrival.edge.key, arrival.worker), []).append(arrival)
        for (_, worker), found in by_worker.items():
            found.sort(key=lambda arrival: place[arrival.task])
            if worker.rank == self.rank:
                self.carried.update((one.edge, following.edge) for one, following in pairwise(found))
        return [found[-1] for found in by_worker.values()]

    def add(self, arrival: Arrival) -> None:
        """Adds a gradient behind those that have been given so far."""
        part, edge, task, worker, channel = arrival
        key = None
        if channel is not None:
            if self.rank not in (channel.source.rank, channel.target.rank):
                return
            key = task, channel
            self.messages.setdefault(key, []).append(edge)
        if self.rank == (worker if channel is None else channel.target).rank:
            self.here.append((part, key))

    @property
    def late(self) -> frozenset[str]:
        """Returns the parameters of this rank whose gradients wait for the end of the step."""
        names = frozenset([whole_name(part.brought) for part, _ in self.here])
        return names if self._late is None else names & self._late
