"""A measured step beside its schedule: what was planned, and where the time went.

    planned    rank 1  .. F0 B0 F1 B1                 the same order, every task as long as its like took in the mean
    measured   rank 1  ...F0 B0.F1-B1                 . waiting   - a gap between tasks

A rank's time is split in five. `bubble` is what the schedule leaves idle even so; what more it stands waiting for the
task of another rank is `late`, and from that task's end on `link`; the rest, between its tasks, is the `host`'s.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from farspan.documents import as_count, as_flag, as_list, as_object, as_text, parse_json, read_text
from farspan.errors import PlanError, quoted
from farspan.planner import Simulation, simulate
from farspan.report.html import html
from farspan.report.text_report import format_share
from farspan.report.timeline import TASKS, Kind, Span, Timeline
from farspan.schedule import Kind as TaskKind
from farspan.schedule import Schedule, Task
from farspan.units import count_of, format_seconds

__all__ = ["MeasuredStep", "Shares", "page_of"]

_VERSION = 1
_KEYS = ("farspan_step", "timeline", "tasks", "orders", "plan", "environment")
_HINT = "farspan run -n 2 --report step.json train.py"
_WORDS = {
    "compute_s": "computing",
    "bubble_s": "bubble of the schedule",
    "late_s": "waiting for a late stage",
    "link_s": "waiting for a link",
    "host_s": "host, between tasks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Seconds of one rank; together the step's duration."""

    compute_s: float
    bubble_s: float
    late_s: float
    link_s: float
    host_s: float


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A step that has run.

    Attributes:
        timeline: When everything ran, on all ranks.
        schedule: The tasks, and the order in which each rank ran its own.
        plan: The plan as a table, for people; may be empty.
        environment: One fact per line.
    """

    timeline: Timeline
    schedule: Schedule
    plan: str = ""
    environment: tuple[str, ...] = ()

    @cached_property
    def spans(self) -> dict[int, Span]:
        """The span of each task, by the task's index: a rank runs its tasks in order."""
        found: dict[int, Span] = {}
        for rank, order in enumerate(self.schedule.orders):
            ran = sorted((s for s in self.timeline.of_rank(rank) if s.kind in TASKS), key=lambda s: s.start_ns)
            found.update(zip(order, ran, strict=False))
        return found

    @cached_property
    def simulation(self) -> Simulation:
        """The schedule, simulated without links; equal work takes equally long: the mean of what was measured."""
        like: dict[tuple[int, TaskKind, int], list[float]] = defaultdict(list)
        for index, span in self.spans.items():
            like[_likeness(self.schedule.tasks[index])].append(span.duration_s)
        means = {key: fmean(durations) for key, durations in like.items()}
        tasks = [replace(task, duration=means.get(_likeness(task), 0.0)) for task in self.schedule.tasks]
        return simulate(Schedule(tasks=tuple(tasks), orders=self.schedule.orders))

    def planned(self) -> Timeline:
        """Returns the schedule as a timeline of its own, simulated without links and with equal durations for equal
        work: the mean of what was measured."""
        simulated = self.simulation
        spans = [
            Span(
                rank=task.rank,
                kind=_KINDS[task.kind],
                name=span.name,
                micro_batch=span.micro_batch,
                start_ns=round(simulated.starts[index] * 1e9),
                end_ns=round(simulated.ends[index] * 1e9),
            )
            for index, task in enumerate(self.schedule.tasks)
            if (span := self.spans.get(index)) is not None
        ]
        return Timeline(
            spans=tuple(spans), num_ranks=self.timeline.num_ranks, title="Planned", names=self.timeline.names
        )

    def shares(self, rank: int) -> Shares:
        """Returns the shares of one rank's time, by what it was spent on."""
        start_ns, end_ns = self.timeline.window_ns
        tasks, order = self.schedule.tasks, self.schedule.orders[rank]
        wait_ends = sorted(span.end_ns for span in self.timeline.of_rank(rank) if span.kind == "wait")
        standing_ns = link_ns = 0
        free_ns = start_ns  # since when the rank has had nothing to run
        for index in order:
            span = self.spans.get(index)
            if span is None:
                continue
            others = [self.spans[need].end_ns for need in tasks[index].needs if need in self.spans]
            ready_ns = max((end for end in others), default=start_ns)
            waits = bisect_right(wait_ends, span.start_ns)
            waited_to_ns = max(free_ns, wait_ends[waits - 1] if waits else free_ns)
            standing_ns += max(0, min(ready_ns, span.start_ns) - free_ns)
            link_ns += max(0, waited_to_ns - max(free_ns, ready_ns))
            free_ns = span.end_ns
        standing_ns += max(0, end_ns - free_ns)
        duration_s, compute_s = (end_ns - start_ns) / 1e9, self.timeline.busy_s(rank)
        unavoidable_s = max(0.0, self.simulation.step_time - self.simulation.busy(rank))
        bubble_s = min(unavoidable_s, standing_ns / 1e9)
        late_s, link_s = standing_ns / 1e9 - bubble_s, link_ns / 1e9
        host_s = max(0.0, duration_s - compute_s - bubble_s - late_s - link_s)
        return Shares(compute_s=compute_s, bubble_s=bubble_s, late_s=late_s, link_s=link_s, host_s=host_s)

    def table(self) -> str:
        """Returns the shares of time as lines for people: one column per rank, and the mean."""
        ranks = range(self.timeline.num_ranks)
        shares = [self.shares(rank) for rank in ranks]
        duration_s = self.timeline.duration_s
        planned = format_seconds(self.simulation.step_time)
        lines = [
            f"step {format_seconds(duration_s)}, {planned} by the schedule alone",
            " " * 26 + "".join(f"{self.timeline.name_of(rank):>10}" for rank in ranks) + f"{'mean':>10}",
        ]
        for name, words in _WORDS.items():
            parts = [getattr(item, name) / duration_s if duration_s else 0.0 for item in shares]
            lines.append(f"{words:<26}" + "".join(f"{format_share(part, 1):>10}" for part in [*parts, fmean(parts)]))
        return "\n".join(lines)

    def to_json(self) -> str:
        """Returns the step as JSON text: the file that `farspan report` reads."""
        tasks = [
            [item.kind.value, item.rank, item.micro_batch, item.level, list(item.needs), item.holds]
            for item in self.schedule.tasks
        ]
        value = {
            "farspan_step": _VERSION,
            "timeline": json.loads(self.timeline.to_json()),
            "tasks": tasks,
            "orders": [list(order) for order in self.schedule.orders],
            "plan": self.plan,
            "environment": list(self.environment),
        }
        return json.dumps(value, separators=(",", ":"))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MeasuredStep:
        """Returns the step in a file.

        Raises:
            PlanError: The file cannot be read or is no step; names the file and the key at fault.
        """
        return cls.from_json(read_text(path, hint=_HINT), os.fspath(path))

    @classmethod
    def from_json(cls, text: str, source: str = "this step") -> MeasuredStep:
        """Returns the step that `to_json` wrote.

        Raises:
            PlanError: It is none; names the key at fault.
        """
        value = as_object(parse_json(text, source), source)
        version = value.get("farspan_step")
        if type(version) is not int or version != _VERSION:
            why = f'its "farspan_step" is {quoted(version)}, not {_VERSION}.'
            raise PlanError(f"{source} is not a step of farspan.", why=why, hint=_HINT)
        as_object(value, source, known=_KEYS, needed=_KEYS)
        timeline = Timeline.from_value(value["timeline"], f"{source}: timeline")
        as_count(timeline.num_ranks, f"{source}: timeline: num_ranks", least=1)
        lines = as_list(value["environment"], f"{source}: environment")
        step = cls(
            timeline=timeline,
            schedule=_schedule(value["tasks"], value["orders"], timeline.num_ranks, source),
            plan=as_text(value["plan"], f"{source}: plan"),
            environment=tuple(as_text(line, f"{source}: environment") for line in lines),
        )
        step._check(source)
        return step

    def _check(self, source: str) -> None:
        """Raise if tasks are in no order, or wait for each other, or are not those that have run."""
        try:
            tasks = self.simulation.schedule.tasks
        except PlanError as error:
            raise PlanError(f"{source}: {error.what}", why=error.why, hint=_HINT) from None
        for rank, order in enumerate(self.schedule.orders):
            ran = Counter(span.kind for span in self.timeline.of_rank(rank) if span.kind in TASKS)
            if ran != Counter(_KINDS[tasks[index].kind] for index in order):
                why = f"its order has {count_of(len(order), 'task')}, its timeline {ran.total()}, or others."
                raise PlanError(
                    f"{source}: {self.timeline.name_of(rank)} ran other tasks than it was to.", why=why, hint=_HINT
                )


def page_of(step: MeasuredStep, *, title: str) -> str:
    """Returns the step as one self-contained HTML page: what was planned above what was measured, and where the time
    went."""
    return html(
        step.timeline,
        title=title,
        planned=step.planned(),
        shares=step.table(),
        plan=step.plan,
        environment=step.environment,
    )


_KINDS: dict[TaskKind, Kind] = {TaskKind.FORWARD: "F", TaskKind.BACKWARD: "B", TaskKind.WEIGHT: "W"}


def _likeness(task: Task) -> tuple[int, TaskKind, int]:
    """Returns tasks that should take equally long."""
    return (task.rank, task.kind, task.level)


def _schedule(tasks: object, orders: object, num_ranks: int, source: str) -> Schedule:
    rows = as_list(tasks, f"{source}: tasks")
    lists = as_list(orders, f"{source}: orders", length=num_ranks)
    return Schedule(
        tasks=tuple(_task(row, index, num_ranks, f"{source}: tasks[{index}]") for index, row in enumerate(rows)),
        orders=tuple(_indices(order, len(rows), f"{source}: orders[{rank}]") for rank, order in enumerate(lists)),
    )


def _task(row: object, index: int, num_ranks: int, where: str) -> Task:
    kind, rank, micro_batch, level, needs, holds = as_list(row, where, length=6)
    if kind not in TASKS:
        raise PlanError(f"{where}: kind is {quoted(kind)}.", why=f"kinds are {', '.join(TASKS)}.", hint='"F"')
    return Task(
        kind=TaskKind(kind),
        rank=as_count(rank, f"{where}: rank", most=num_ranks - 1),
        micro_batch=as_count(micro_batch, f"{where}: micro_batch", least=-1),
        level=as_count(level, f"{where}: level"),
        duration=1.0,
        needs=_indices(needs, index, f"{where}: needs"),
        holds=as_flag(holds, f"{where}: holds"),
    )


def _indices(value: object, count: int, where: str) -> tuple[int, ...]:
    """Indices of the first so many tasks, none of them twice."""
    found = tuple(as_count(index, where, most=count - 1) for index in as_list(value, where))
    if len(set(found)) < len(found):
        raise PlanError(f"{where} is {quoted(value)}.", why="a task is there twice.", hint="take one of them out")
    return found
