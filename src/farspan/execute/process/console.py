"""Writes to the user of `farspan run`, besides the program's own output: the plan, and a report of one step."""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from farspan import settings
from farspan.control.channel import SideChannel
from farspan.execute.step.step_record import StepRecord
from farspan.launch.rank.status import StatusFile
from farspan.outputs import keep_text, write_line
from farspan.plan import PLANNED_SECONDS, Plan
from farspan.progress import Progress, said_if_slow
from farspan.report import MeasuredStep, Span, Timeline, page_of, summary, svg
from farspan.units import count_of, format_seconds

__all__ = ["Console", "keep_log_apart"]

_log = logging.getLogger(__name__)
_REPORTED_STEPS = (3, 10, 30)
"""Training steps after which the report is written: an early one, then ones that have settled."""
_MOST_NOTES = 10
_COMPARED_STEP = 3
"""The training step after which it is said how far the plan was off."""
_LEAST_GAIN = 1.1
"""The gain of more micro-batches from which on they are mentioned."""
_UNEVEN = 1.1
"""The ratio of two ranks' errors from which on another plan may be better."""


class _StandardError(logging.Handler):
    """Writes warnings to standard error, and what the program has asked for by setting the level of "farspan"."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING or logging.getLogger("farspan").level != logging.NOTSET:
            write_line(record.getMessage())


def keep_log_apart() -> None:
    """Let no log of the script's have our lines: it is to be that of one process. Unless the script gives our logger
    handlers of its own.
    """
    logger = logging.getLogger("farspan")
    if not logger.handlers:
        logger.addHandler(_StandardError())
        logger.propagate = False
    if settings.flag("VERBOSE", default=False) and logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


class Console:
    """The part of one rank in what the user sees. Only rank 0 prints and writes."""

    def __init__(self, side: SideChannel, deadline_s: float) -> None:
        self.side = side
        self.deadline_s = deadline_s
        self.is_launched = os.environ.get("FARSPAN_LAUNCHER") == "run"
        self.is_mute = False
        """True if another group's rank 0 speaks for all."""
        self.report_path = settings.text("REPORT")
        self._is_report_kept = True
        self._has_named_report = False
        self.plan: Plan | None = None
        self.best_lanes: Callable[[Sequence[float]], tuple[int, float]] | None = None
        """Gives the number of micro-batches whose simulated step is the shortest, by what each rank works in a step of
        one, and how many times as fast that is.
        """
        self.num_training_steps = 0
        self.notes: list[str] = []
        """On the run, for the report."""
        self.reported_steps = set(_REPORTED_STEPS)
        self._status = _status_file() if self.is_launched and side.world_size > 1 else None
        self.is_counting = True
        """Whether what runs is the program's own steps."""

    @property
    def _speaks(self) -> bool:
        return self.side.rank == 0 and not self.is_mute

    def show_plan(self, plan: Plan) -> None:
        """Print the plan as a table, once for each model."""
        self.plan = plan
        _log.info("plan:\n%s", plan)
        self._write_line(str(plan))

    def note(self, text: str) -> None:
        """Something about the run for its report, which is written again: the plan may be another."""
        self.notes.append(f"step {self.num_training_steps}: {text}")
        del self.notes[:-_MOST_NOTES]
        self.reported_steps = {self.num_training_steps + number for number in _REPORTED_STEPS}

    def say(self, text: str) -> None:
        """Something about the plan that the user should know."""
        _log.info("%s", text)
        self._write_line(text)

    def warn(self, text: str) -> None:
        """Something about the program that the user should know, whoever has launched it: one line of rank 0's."""
        _log.info("%s", text)
        if self._speaks:
            write_line(text)

    def said_if_slow(self, what: str) -> AbstractContextManager[Progress]:
        """Let rank 0 say what is done in the body, and how far it is, where it takes longer than a few seconds."""
        return said_if_slow(what, self.warn if self._speaks else None)

    def step_ended(self, record: StepRecord) -> None:
        """Count a training step; after some of them all ranks give their timelines and rank 0 writes the report."""
        if not record.has_backward or not self.is_counting:
            return
        self.num_training_steps += 1
        if self._status is not None:
            self._note(self._status, record)
        if self.num_training_steps == _COMPARED_STEP and self._speaks:
            self._compare(record)
            self._hint_at_micro_batches(record)
        if not self.report_path or self.num_training_steps not in self.reported_steps:
            return
        key = f"timeline {record.number}"
        self.side.contribute(key, _timeline_of(record).to_json().encode(), receiver=0)
        if self.side.rank == 0:
            parts = self.side.gathered(key, self.deadline_s)
            timeline = Timeline.merge([Timeline.from_json(part) for part in parts])
            if self._is_report_kept and self._speaks:  # else a warning has said that it cannot be
                self._write(timeline, record)
            self.side.forget(key)

    def _note(self, status: StatusFile, record: StepRecord) -> None:
        """Say for `farspan top` how far this rank is."""
        try:
            status.write(
                step=self.num_training_steps,
                compute_s=record.compute_s,
                wait_s=record.wait_s,
                micro_batches=record.num_micro_batches,
            )
        except OSError as error:
            _log.warning("farspan top will not show this rank any more: %s", error)
            self._status = None

    def _compare(self, record: StepRecord) -> None:
        """Logs by how much the seconds that the plan was made with are wrong: with --verbose it is on the console."""
        if self.plan is None or PLANNED_SECONDS not in self.plan.estimates or record.exchange is None:
            return
        planned = [0.0] * self.side.world_size
        for stage, seconds in enumerate(self.plan.estimates[PLANNED_SECONDS]):
            planned[self.plan.rank_of(stage)] += seconds * record.num_micro_batches
        busy = record.exchange.busy_s()
        factors = {rank: busy[rank] / expected for rank, expected in enumerate(planned) if expected}
        parts = [
            f"rank {rank} {format_seconds(busy[rank])} ({100 * (factor - 1):+.0f} %)"
            for rank, factor in factors.items()
        ]
        text = f"work of step {_COMPARED_STEP}, and how it differs from the plan: {', '.join(parts)}"
        if factors and max(factors.values()) > _UNEVEN * min(factors.values()):
            text += "; farspan plan --recalibrate step.json may find a better plan (farspan run --report step.json)"
        _log.info("%s", text)

    def _hint_at_micro_batches(self, record: StepRecord) -> None:
        """Say what micro-batches would win where the ranks wait for each other."""
        if self.plan is None or self.best_lanes is None or record.exchange is None:
            return
        is_split = any(map(self.plan.is_split, range(self.plan.num_stages)))  # whose ranks work side by side
        if is_split or max(record.num_micro_batches, self.plan.micro_batches) > 1:
            return
        number, gain = self.best_lanes(record.exchange.busy_s())
        if gain >= _LEAST_GAIN:
            text = (
                "a step is one micro-batch, so one rank works at a time: farspan.distribute(model, "
                f"micro_batches={number}) would make it up to {gain:.1f} times as fast, if the rows of a batch do not "
                "depend on each other (numbers then differ by rounding)"
            )
            _log.info("%s", text)
            self._write_line(text)

    def _write_line(self, text: str) -> None:
        """Writes a line to standard error: standard output is the script's own, and may be piped."""
        if self._speaks and self.is_launched:
            write_line(text)

    def _write(self, timeline: Timeline, record: StepRecord) -> None:
        path, threads = Path(self.report_path), count_of(torch.get_num_threads(), "thread")
        step = MeasuredStep(
            timeline=timeline,
            schedule=record.schedule,
            plan=str(self.plan or ""),
            environment=(
                f"training step {self.num_training_steps} of {' '.join(sys.argv)}",
                *self.notes,
                summary(timeline),
                f"torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}",
                f"{count_of(self.side.world_size, 'rank')} of {threads} on {count_of(os.cpu_count() or 1, 'core')}",
            ),
        )
        if path.suffix == ".svg":
            page = svg(timeline)
        elif path.suffix == ".json":
            page = step.to_json()
        else:
            page = page_of(step, title=f"farspan: {Path(sys.argv[0]).name}")
        self._is_report_kept = keep_text(path, page, "the report")
        if self._is_report_kept and not self._has_named_report:
            self._has_named_report = True
            write_line(f"farspan: wrote {path}, the report on training step {self.num_training_steps}{_later(self)}")


def _later(console: Console) -> str:
    """Returns in words after which steps the report is written again."""
    later = [str(step) for step in sorted(console.reported_steps) if step > console.num_training_steps]
    return f" (it is written again after step {' and '.join(later)})" if later else ""


def _status_file() -> StatusFile | None:
    """Returns the record of this rank in the run's folder of logs."""
    try:
        return StatusFile(os.environ["FARSPAN_LOG_DIR"], int(os.environ["FARSPAN_RANK"]))
    except OSError as error:
        _log.warning("farspan top will not show this rank: %s", error)
        return None


def _timeline_of(record: StepRecord) -> Timeline:
    wall_ns = (
        time.time_ns() - time.perf_counter_ns()
    )  # clocks of different hosts agree only so far as their wall clocks
    return Timeline(
        spans=tuple(
            Span(
                rank=trace.queue,
                kind=trace.kind,
                name=trace.name,
                micro_batch=trace.micro_batch,
                start_ns=trace.start_ns + wall_ns,
                end_ns=trace.end_ns + wall_ns,
            )
            for trace in record.traces
        ),
        num_ranks=len(record.schedule.orders),
        title="One training step",
        names=record.names,
    )
