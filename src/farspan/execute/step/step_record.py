"""The record of a step that has run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from farspan.execute.exchange import Exchange
from farspan.program.options import Settings
from farspan.program.route import queues_of
from farspan.schedule import Schedule

__all__ = ["StepRecord", "Trace"]


@dataclass(frozen=True, slots=True)
class Trace:
    """A stretch of a rank's time."""

    kind: Literal["F", "B", "W", "wait"]
    name: str
    micro_batch: int
    queue: int
    """The number of the worker's order in the schedule."""
    start_ns: int
    end_ns: int
    waited_ns: int = 0
    """The part of it in which a task waited for parameters that other groups hold."""

    @property
    def compute_ns(self) -> int:
        """Returns the nanoseconds of it in which this rank computed."""
        return 0 if self.kind == "wait" else self.end_ns - self.start_ns - self.waited_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A step that has run, as this rank saw it."""

    number: int
    rank: int
    num_micro_batches: int
    has_backward: bool
    began_ns: int
    traces: tuple[Trace, ...]
    exchange: Exchange | None
    schedule: Schedule
    """The schedule of all ranks."""
    settings: Settings
    """The settings with which the program of the step was made."""

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names by which people know the orders of the schedule; () where each rank has one."""
        num_ranks = self.settings.num_ranks
        names = {number: f"rank {number}" for number in range(len(self.schedule.orders))}
        for worker, number in queues_of(self.settings.teams, num_ranks).items():
            if number >= num_ranks:
                names[number] = f"{worker.rank}/{worker.device}"
        return tuple(names.values()) if len(names) > num_ranks else ()

    @property
    def duration_s(self) -> float:
        """Returns the seconds from the first task's begin to the last one's end, on this rank."""
        if not self.traces:
            return 0.0
        return (self.traces[-1].end_ns - self.traces[0].start_ns) / 1e9

    @property
    def compute_s(self) -> float:
        """Returns the seconds in which this rank computed."""
        return sum(trace.compute_ns for trace in self.traces) / 1e9

    @property
    def wait_s(self) -> float:
        """Returns the seconds in which this rank waited for messages of others, and for parameters that they hold."""
        return sum(trace.end_ns - trace.start_ns - trace.compute_ns for trace in self.traces) / 1e9

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they did not compute, 0 to 1. All ranks must have ended the step."""
        if self.exchange is None or not self.duration_s:
            return 0.0
        busy_s = self.exchange.busy_s()
        span_s = max(self.duration_s, *busy_s)
        return 1.0 - sum(busy_s) / (len(busy_s) * span_s)
