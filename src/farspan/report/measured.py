"""A measured step beside its schedule: what was planned, and where the time went.

    planned    rank 1  .. F0 B0 F1 B1                 the same order, every task as long as its like took in the mean
    measured   rank 1  ...F0 B0.F1-B1                 . waiting   - a gap between tasks

A rank's time is split in five. `bubble` is what the schedule leaves idle even so; what more it stands waiting for the
task of another rank is `late`, and from that task's end on `link`; the rest, between its tasks, is the `host`'s.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any, cast

from farspan.planner import Simulation, simulate
from farspan.report.html import html
from farspan.report.text import format_duration, format_share
from farspan.report.timeline import TASKS, Kind, Span, Timeline
from farspan.schedule import Kind as TaskKind
from farspan.schedule import Schedule, Task

__all__ = ["MeasuredStep", "Shares", "page_of"]

_VERSION = 1
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
        """The schedule, played without links and with equal durations for equal work: the mean of what was measured."""
        like: dict[tuple[int, TaskKind, int], list[float]] = defaultdict(list)
        for index, span in self.spans.items():
            like[_likeness(self.schedule.tasks[index])].append(span.duration_s)
        means = {key: fmean(durations) for key, durations in like.items()}
        tasks = [replace(task, duration=means.get(_likeness(task), 0.0)) for task in self.schedule.tasks]
        return simulate(Schedule(tasks=tuple(tasks), orders=self.schedule.orders))

    def planned(self) -> Timeline:
        """The schedule as a timeline of its own."""
        played = self.simulation
        spans = [
            Span(
                rank=task.rank,
                kind=_KINDS[task.kind],
                name=span.name,
                micro_batch=span.micro_batch,
                start_ns=round(played.starts[index] * 1e9),
                end_ns=round(played.ends[index] * 1e9),
            )
            for index, task in enumerate(self.schedule.tasks)
            if (span := self.spans.get(index)) is not None
        ]
        return Timeline(spans=tuple(spans), num_ranks=self.timeline.num_ranks, title="Planned")

    def shares(self, rank: int) -> Shares:
        """Where the time of one rank went."""
        start_ns, end_ns = self.timeline.window_ns
        tasks, order = self.schedule.tasks, self.schedule.orders[rank]
        standing_ns = link_ns = 0
        free_ns = start_ns  # since when the rank has had nothing to run
        for index in order:
            span = self.spans.get(index)
            if span is None:
                continue
            others = [self.spans[need].end_ns for need in tasks[index].needs if need in self.spans]
            ready_ns = max((end for end in others), default=start_ns)
            waits = [(w.start_ns, w.end_ns) for w in self._waits(rank) if free_ns <= w.end_ns <= span.start_ns]
            waited_to_ns = max((end for _, end in waits), default=free_ns)
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

    def _waits(self, rank: int) -> list[Span]:
        return [span for span in self.timeline.of_rank(rank) if span.kind == "wait"]

    def table(self) -> str:
        """Where the time went, as lines for people: one column per rank, and the mean."""
        ranks = range(self.timeline.num_ranks)
        shares = [self.shares(rank) for rank in ranks]
        duration_s = self.timeline.duration_s
        planned = format_duration(self.simulation.step_time)
        lines = [
            f"step {format_duration(duration_s)}, {planned} by the schedule alone",
            " " * 26 + "".join(f"{f'rank {rank}':>10}" for rank in ranks) + f"{'mean':>10}",
        ]
        for name, words in _WORDS.items():
            parts = [getattr(item, name) / duration_s if duration_s else 0.0 for item in shares]
            lines.append(f"{words:<26}" + "".join(f"{format_share(part, 1):>10}" for part in [*parts, fmean(parts)]))
        return "\n".join(lines)

    def to_json(self) -> str:
        """The step as JSON text: the file that `farspan report` reads."""
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
    def from_json(cls, text: str) -> MeasuredStep:
        """The step that `to_json` wrote.

        Raises:
            ValueError: It is not one.
        """
        read: Any = json.loads(text)
        value = cast("dict[str, Any]", read if isinstance(read, dict) else {})
        if value.get("farspan_step") != _VERSION:
            raise ValueError(f'no step of farspan: "farspan_step" is not {_VERSION}')
        try:
            return cls(
                timeline=Timeline.from_json(json.dumps(value["timeline"])),
                schedule=Schedule(tasks=_tasks(value["tasks"]), orders=tuple(map(tuple, value["orders"]))),
                plan=value["plan"],
                environment=tuple(value["environment"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"a step of farspan that lacks something: {error}") from error


def page_of(step: MeasuredStep, *, title: str) -> str:
    """The step as one self-contained HTML page: what was planned above what was measured, and where the time went."""
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
    """Tasks that should take equally long."""
    return (task.rank, task.kind, task.level)


def _tasks(rows: Sequence[Sequence[Any]]) -> tuple[Task, ...]:
    return tuple(
        Task(
            kind=TaskKind(kind),
            rank=rank,
            micro_batch=micro_batch,
            level=level,
            duration=1.0,
            needs=tuple(needs),
            holds=holds,
        )
        for kind, rank, micro_batch, level, needs, holds in rows
    )
