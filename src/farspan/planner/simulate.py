"""A step, simulated event by event: tasks on ranks, messages on links.

A rank runs its tasks in order, each as soon as all that it needs is there. A message is ready to leave when its task
has ended and its receive is posted; then it waits for its link, which carries one message at a time:

    task         |== rank 0 ==|
    link                      |.. another ..|== size / bandwidth ==|
    arrival                                                        |-- latency --|
    task                                                                         |== rank 1 ==|

Sends are asynchronous: a rank never waits for one. Where the orders wait for each other the error says who waits for
what.
"""

from __future__ import annotations

import heapq

from farspan.errors import PlanError
from farspan.planner.links import Route, own_links
from farspan.planner.simulation import Simulation, Transfer
from farspan.schedule import Message, Schedule, Task, channels_of

__all__ = ["simulate"]

_SHOWN = 4


def simulate(schedule: Schedule, *, link_of: Route | None = None, lookahead: int | None = None) -> Simulation:
    """Simulates a step.

    Args:
        schedule: The tasks and their orders.
        link_of: The link from one rank to another; by default messages take no time.
        lookahead: Receives are posted so many tasks before the one that needs them; by default all at the start.

    Raises:
        PlanError: The orders wait for each other, a task is missing or comes twice or on another rank than its own.

    Example:
        >>> from farspan.schedule import Kind, Schedule, Task
        >>> whole = {"kind": Kind.FORWARD, "micro_batch": 0, "duration": 1.0, "holds": False}
        >>> tasks = Task(rank=0, level=0, needs=(), **whole), Task(rank=1, level=1, needs=(0,), **whole)
        >>> step = simulate(Schedule(tasks=tasks, orders=((0,), (1,))), link_of=own_links(latency=0.5))
        >>> step.step_time, step.ends
        (2.5, (1.0, 2.5))
    """
    _check_complete(schedule)
    simulator = _Simulator(schedule, link_of or own_links(), lookahead)
    simulator.run()
    return Simulation(
        schedule=schedule,
        starts=tuple(simulator.starts),
        ends=tuple(simulator.ends),
        transfers=tuple(simulator.transfers),
    )


class _Simulator:
    """Simulates a step, event by event: where every rank and every link stands."""

    def __init__(self, schedule: Schedule, link_of: Route, lookahead: int | None) -> None:
        self.tasks, self.orders = schedule.tasks, schedule.orders
        self.link_of = link_of
        self.places = [0] * schedule.num_ranks
        self.is_running = [False] * schedule.num_ranks
        self.starts = [0.0] * len(self.tasks)
        self.ends = [0.0] * len(self.tasks)
        self.waiting = [len(task.needs) for task in self.tasks]
        """How many of a task's needs have not arrived."""
        self.local: list[list[int]] = [[] for _ in self.tasks]
        """For each task the tasks of the same rank that need it."""
        for index, task in enumerate(self.tasks):
            for need in task.needs:
                if self.tasks[need].rank == task.rank:
                    self.local[need].append(index)
        self.sends: list[list[Message]] = [[] for _ in self.tasks]
        self.posts: dict[tuple[int, int], list[Message]] = {}
        """Receives to post, by rank and place in its order."""
        self.unready: dict[tuple[int, int], int] = {}
        """By task and destination: 2 or 1 while a message is not sent, its receive not posted, or both."""
        for channel, messages in channels_of(schedule, lookahead=lookahead or 0).items():
            for message in messages:
                self.sends[message.task].append(message)
                self.unready[message.task, channel.destination] = 1 if lookahead is None else 2
                if lookahead is not None:
                    self.posts.setdefault((channel.destination, message.posted_at), []).append(message)
        self.link_free: dict[str, float] = {}
        self.transfers: list[Transfer] = []
        self.events: list[tuple[float, int, int | Message]] = []
        """(time, number, task that ends or message that arrives)."""
        self.num_pushed = 0

    def run(self) -> None:
        for rank in range(len(self.orders)):
            self._reach(rank, 0.0)
        while self.events:
            now, _, event = heapq.heappop(self.events)
            if isinstance(event, Message):
                for user in event.users:
                    self.waiting[user] -= 1
                self._start(event.channel.destination, now)
            else:
                self._end(event, now)
        if any(place < len(order) for place, order in zip(self.places, self.orders, strict=True)):
            self._complain()

    def _reach(self, rank: int, now: float) -> None:
        """A rank has come to its next task."""
        for message in self.posts.get((rank, self.places[rank]), ()):
            self._advance(message, now)
        self._start(rank, now)

    def _start(self, rank: int, now: float) -> None:
        """Begin a rank's next task, if it can."""
        place, order = self.places[rank], self.orders[rank]
        if self.is_running[rank] or place == len(order) or self.waiting[order[place]]:
            return
        index = order[place]
        self.is_running[rank] = True
        self.starts[index] = now
        self._push(now + self.tasks[index].duration, index)

    def _end(self, index: int, now: float) -> None:
        rank = self.tasks[index].rank
        self.ends[index] = now
        self.is_running[rank] = False
        self.places[rank] += 1
        for follower in self.local[index]:
            self.waiting[follower] -= 1
        for message in self.sends[index]:
            self._advance(message, now)
        self._reach(rank, now)

    def _advance(self, message: Message, now: float) -> None:
        """A message has been sent, or its receive posted; after both it travels."""
        key = (message.task, message.channel.destination)
        self.unready[key] -= 1
        if not self.unready[key]:
            link = self.link_of(message.channel.source, message.channel.destination)
            start = max(now, self.link_free.get(link.name, 0.0))
            free = start + message.size_bytes / link.bandwidth
            self.link_free[link.name] = free
            end = free + link.latency
            self.transfers.append(Transfer(message=message, start=start, free=free, end=end))
            self._push(end, message)

    def _push(self, time: float, event: int | Message) -> None:
        self.num_pushed += 1
        heapq.heappush(self.events, (time, self.num_pushed, event))

    def _complain(self) -> None:
        lines: list[str] = []
        done = {index for order, place in zip(self.orders, self.places, strict=True) for index in order[:place]}
        for rank, (order, place) in enumerate(zip(self.orders, self.places, strict=True)):
            if place < len(order):
                task = self.tasks[order[place]]
                missing = next(need for need in task.needs if need not in done)
                lines.append(f"rank {rank} waits at {_name(task)} for {_name(self.tasks[missing])}")
        more = f"\nand {len(lines) - _SHOWN} more ranks" if len(lines) > _SHOWN else ""
        raise PlanError(
            f"the schedule cannot end: {len(done)} of {len(self.tasks)} tasks have run.",
            why=";\n".join(lines[:_SHOWN]) + more,
            hint="orders with each task after all that it needs: schedule.orders_by_name(name, tasks, num_ranks)",
        )


def _check_complete(schedule: Schedule) -> None:
    found: set[int] = set()
    for rank, order in enumerate(schedule.orders):
        for index in order:
            task = schedule.tasks[index]
            if task.rank != rank:
                raise PlanError(f"{_name(task)} is not rank {rank}'s.", why=f"it stands in the order of rank {rank}.")
            if index in found:
                raise PlanError(f"{_name(task)} comes twice.", why="a task runs once in a step.")
            found.add(index)
    missing = [task for index, task in enumerate(schedule.tasks) if index not in found]
    if missing:
        raise PlanError(
            f"nobody runs {_name(missing[0])}.", why=f"{len(missing)} of {len(schedule.tasks)} tasks are in no order."
        )


def _name(task: Task) -> str:
    return f"{task.kind.value}{task.micro_batch} of rank {task.rank} (level {task.level})"
