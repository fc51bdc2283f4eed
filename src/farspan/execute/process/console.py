"""Writes to the user of `farspan run`, besides the program's own output: the plan, and a report of one step."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import linecache
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from farspan import settings
from farspan.call.naming import format_where
from farspan.control.channel import SideChannel
from farspan.errors import LaunchError
from farspan.execute.process.summary import LEAST_TIMES, Ranks, StepTime, describe_run, median_busy_s, num_cores
from farspan.execute.step.step_record import StepRecord
from farspan.launch.environment import read_environment
from farspan.launch.rank.status import StatusFile
from farspan.outputs import keep_text, marked, write_line
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
_UNTIMED = 2
"""Training steps after a plan has been shown that are like no later ones: something is made in them, or moved."""
_MOST_TIMES = 200
"""Times of steps that are kept: those of the last ones."""


_IS_WRITTEN = "is_written"
"""Of a record of the log: the console has its words already."""


class _StandardError(logging.Handler):
    """Writes warnings to standard error, and what the program has asked for by setting the level of "farspan"."""

    def emit(self, record: logging.LogRecord) -> None:
        is_asked_for = record.levelno >= logging.WARNING or logging.getLogger("farspan").level != logging.NOTSET
        if is_asked_for and not getattr(record, _IS_WRITTEN, False):
            write_line(marked(record.getMessage()))


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
        self.may_cut: Callable[[], bool] = lambda: True
        """Says whether more micro-batches may be worth trying, by what is known of the models' batches."""
        self.num_training_steps = self.num_backward_runs = 0
        self.notes: list[str] = []
        """On the run, for the report."""
        self.reported_steps = set(_REPORTED_STEPS)
        self._status = _status_file() if self.is_launched and side.world_size > 1 else None
        self.is_counting = True
        """Whether what runs is the program's own steps."""
        self._first_timed = _UNTIMED + 1
        self._times: collections.deque[StepTime] = collections.deque(maxlen=_MOST_TIMES)
        self._ended_ns = self._run_ns = 0
        self._busy_s: list[float] = []
        self._num_micro_batches = self._num_before = 0
        """Those of the training step that goes on, and of the one before."""
        self._has_optimizer = False
        """Whether an optimizer has stepped: a training step goes on until one does. Else each backward ends one."""
        self._is_step_open = False
        self._said_hint = ""
        """What has been shown of how micro-batches would overlap: the summary leaves it out."""
        self._drawing: dict[str, int] = {}
        """How often what is recorded ran before a module that decides by what it draws, after a backward."""
        self._read_at: Any = None
        """The program's line whose reading has ended the last backward of the training step that goes on."""
        self._reading: dict[Any, int] = {}
        """By such a line, how often the step has gone on behind it."""

    @property
    def _speaks(self) -> bool:
        return self.side.rank == 0 and not self.is_mute

    def show_plan(self, plan: Plan, *, instead_of: Plan | None = None) -> None:
        """Print the plan of a model as a table; with --verbose alone where just its estimates are others.

        Args:
            plan: It.
            instead_of: The plan of this model that has been shown before.
        """
        self.plan = plan
        self._first_timed = self.num_training_steps + _UNTIMED + 1
        self._times.clear()
        if instead_of is not None and _without_estimates(plan) == _without_estimates(instead_of):
            _log.info("%s", plan)
        else:
            self.say(str(plan))

    def note(self, text: str) -> None:
        """Something about the run for its report, which is written again: the plan may be another."""
        self.notes.append(f"step {self.num_training_steps}: {text}")
        del self.notes[:-_MOST_NOTES]
        self.reported_steps = {self.num_training_steps + number for number in _REPORTED_STEPS}

    def say(self, text: str) -> None:
        """Something about the plan that the user should know, who has started this by `farspan run`."""
        self._say(text, is_shown=self._speaks and self.is_launched)

    def warn(self, text: str) -> None:
        """Something about the program that the user should know, whoever has launched it: one line of rank 0's."""
        self._say(text, is_shown=self._speaks)

    def _say(self, text: str, *, is_shown: bool) -> None:
        """Says it in the log, and on standard error too: standard output is the script's own, and may be piped."""
        _log.info("%s", text, extra={_IS_WRITTEN: is_shown})
        if is_shown:
            write_line(marked(text))

    def said_if_slow(self, what: str) -> AbstractContextManager[Progress]:
        """Let rank 0 say what is done in the body, and how far it is, where it takes longer than a few seconds."""
        return said_if_slow(what, self.warn if self._speaks else None, self.side.waits.describe_other)

    def step_ended(self, record: StepRecord, read_at: Any = None) -> None:
        """What was recorded has run, a training step or a part of one; in some of these all ranks give their timelines
        and rank 0 writes the report. It has run for the program reads a value at the line `read_at`, if that is known.
        """
        if not self.is_counting:
            return
        is_first = record.has_backward and not self._is_step_open
        self.num_backward_runs += record.has_backward
        self.num_training_steps += is_first
        if self._speaks:
            self._add_time(record)
        if not record.has_backward:
            return
        if self._read_at is not None and not is_first:
            self._reading[self._read_at] = self._reading.get(self._read_at, 0) + 1
        self._is_step_open, self._read_at = self._has_optimizer, read_at
        if self._status is not None:
            self._note(self._status, record)
        if not is_first:
            return
        if self._has_optimizer and self.num_training_steps == _COMPARED_STEP and self._speaks:
            self._compare(record)
            if record.exchange is not None:
                number = max(record.num_micro_batches, self._num_before)
                hint = self._overlap_hint() or self._micro_batches_hint(record.exchange.busy_s(), number)
                if hint:
                    self.say(hint)
                    self._said_hint = hint if self.is_launched else ""
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

    def optimizer_stepped(self) -> None:
        """An optimizer has stepped: that ends a training step, if a backward has run since the last one. What has run
        before the first one was one step.
        """
        if not self.is_counting:
            return
        if not self._has_optimizer:
            self._has_optimizer, self._is_step_open = True, self.num_training_steps > 0
            self.num_training_steps = min(self.num_training_steps, 1)
            self._times.clear()
        if self._is_step_open and self._speaks:
            self._end_time()
        self._is_step_open = False

    def note_drawing(self, what: str) -> None:
        """What was recorded, and a backward in it, has run before its time, for `what` decides by what it draws."""
        if self.is_counting:
            self._drawing[what] = self._drawing.get(what, 0) + 1

    def add_averaging(self, averaging_ns: int) -> None:
        """Gradients have been averaged for so long, after a step."""
        self._run_ns += averaging_ns

    def _add_time(self, record: StepRecord) -> None:
        """Keep what a part of a training step took; what has no backward is a part of the step that follows."""
        now_ns = time.perf_counter_ns()
        busy_s = [record.compute_s] if record.exchange is None else record.exchange.busy_s()
        self._run_ns += now_ns - record.began_ns
        is_same = len(self._busy_s) == len(busy_s)  # not the first, nor after a rank was lost
        self._busy_s = [a + b for a, b in zip(self._busy_s, busy_s, strict=True)] if is_same else busy_s
        if record.has_backward:
            self._num_micro_batches += record.num_micro_batches
            if not self._has_optimizer:
                self._end_time()

    def _end_time(self) -> None:
        """A training step is over."""
        now_ns = time.perf_counter_ns()
        if self.num_training_steps >= self._first_timed:
            wall_s, run_s = (now_ns - self._ended_ns) / 1e9, self._run_ns / 1e9
            self._times.append(StepTime(wall_s, run_s, tuple(self._busy_s), self._num_micro_batches))
        self._ended_ns, self._run_ns, self._busy_s = now_ns, 0, [0.0] * len(self._busy_s)
        self._num_before, self._num_micro_batches = self._num_micro_batches, 0

    def summarize(self, num_groups: int, device_types: Collection[str]) -> None:
        """The program is over, and well: say what its steps took, what one rank would take, and what to try.

        Args:
            num_groups: Groups of ranks, of which this is the first.
            device_types: Of what runs the stages.
        """
        if len(self._times) < LEAST_TIMES or num_groups * self.side.world_size < 2:  # or this rank does not speak
            return
        num_near = 0
        with contextlib.suppress(LaunchError):
            num_near = read_environment(needs_rendezvous=False).local_world_size
        ranks = Ranks(
            num_groups=num_groups,
            num_near=num_near,
            num_threads=torch.get_num_threads(),
            num_cores=num_cores(),
            is_timed=set(device_types) <= {"cpu"},
            may_cut=self.may_cut(),
        )
        times = [each for each in self._times if len(each.busy_s) == len(self._times[-1].busy_s)]
        hint = self._overlap_hint() or self._micro_batches_hint(median_busy_s(times), times[-1].num_micro_batches)
        for line in describe_run(self.num_training_steps, times, ranks, hint):
            if line != self._said_hint:
                self.warn(line)

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

    def _overlap_hint(self) -> str:
        """Returns how micro-batches would overlap that end because a module decides by what it draws, or because the
        program reads a value; "" where neither is often so."""
        counts: dict[Any, int] = {**self._drawing, **self._reading}
        most: Any = max(counts, key=counts.__getitem__, default="")
        if not most or counts[most] < self.num_training_steps // 2:
            return ""
        if most in self._drawing:
            return (
                f"{most} decides by what it draws, so a micro-batch ends before the next one begins: "
                "farspan.distribute(model, seed=0) lets them overlap (it draws other numbers, the same for every plan)"
            )
        if self.plan is None or len(self.plan.stages) == 1 or any(map(self.plan.is_split, range(self.plan.num_stages))):
            return ""  # its ranks work side by side anyway
        code, line = most
        source = linecache.getline(code.co_filename, line).strip()
        at = f"{source and f'{source}, '}at {format_where(most)}"
        return (
            f"a value is read after each micro-batch ({at}), so one ends before the next one begins: keep the "
            "tensors (losses.append(loss.detach())) and read them after optimizer.step(), and they overlap"
        )

    def _micro_batches_hint(self, busy_s: Sequence[float], num_micro_batches: int) -> str:
        """Returns what more micro-batches would win where the ranks wait for each other; "" if that is little.

        Args:
            busy_s: What each rank has computed in a step.
            num_micro_batches: Of that step.
        """
        if self.plan is None or self.best_lanes is None or not self.may_cut():
            return ""
        is_split = any(map(self.plan.is_split, range(self.plan.num_stages)))  # whose ranks work side by side
        if is_split or max(num_micro_batches, self.plan.micro_batches) > 1:
            return ""
        number, gain = self.best_lanes(busy_s)
        if gain < _LEAST_GAIN:
            return ""
        return (
            "a step is one micro-batch, so one rank works at a time: farspan.distribute(model, "
            f"micro_batches={number}) would make it up to {gain:.1f} times as fast, if the rows of a batch do not "
            "depend on each other (numbers then differ by rounding)"
        )

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


def _without_estimates(plan: Plan) -> str:
    return str(dataclasses.replace(plan, estimates={}))


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
