"""What rank 0 says at the end of a run: how long its steps took, what one rank would take, and what to try.

    60 training steps, 1.10 s each (median of the last 57)
    forward and backward take 1.00 s of it; one rank of 1 thread would take about 1.90 s, the computing of 2 ranks added
      up: 1.9 times as fast on 2 ranks

What one rank would take is the time in which the ranks have computed, all of it added up. So it is about forward and
backward alone: what the program does besides (its data, its optimizer) takes what it takes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from farspan.units import count_of, format_seconds

__all__ = ["LEAST_TIMES", "Ranks", "StepTime", "describe_run", "median_busy_s", "num_cores"]

LEAST_TIMES = 3
"""Times of steps without which nothing is said of them."""
_SAME = 1.05
"""The ratio of two times up to which they are the same."""
_GOOD = 0.6
"""The share of their time in which ranks work, from which on nothing is to be tried."""


class StepTime(NamedTuple):
    """The time of one training step, as rank 0 saw it.

    Attributes:
        wall_s: From the end of the step before to its own.
        run_s: In which what was recorded ran, and gradients of groups were averaged.
        busy_s: In which each rank computed.
        num_micro_batches: Of the step.
    """

    wall_s: float
    run_s: float
    busy_s: tuple[float, ...]
    num_micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """What has run the steps.

    Attributes:
        num_groups: Groups of ranks, each with a model of its own.
        num_near: Ranks on the machine of rank 0; 0 where that is not known.
        num_threads: Of each of them.
        num_cores: That they may use.
        is_timed: Whether the time in which a rank computes is known: not where a device does, which is only given work.
        may_cut: Whether more micro-batches may be worth trying.
    """

    num_groups: int = 1
    num_near: int = 0
    num_threads: int = 1
    num_cores: int = 1
    is_timed: bool = True
    may_cut: bool = True

    @property
    def share_cores(self) -> bool:
        """Whether ranks wait for a core in the time in which they seem to compute."""
        return self.num_near * self.num_threads > self.num_cores


def num_cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def median_busy_s(times: Sequence[StepTime]) -> list[float]:
    """Returns for each rank the seconds in which it computed in a step."""
    return [median(column) for column in zip(*(each.busy_s for each in times), strict=True)]


def describe_run(num_steps: int, times: Sequence[StepTime], ranks: Ranks, hint: str = "") -> list[str]:
    """Returns the lines on a run.

    Args:
        num_steps: Training steps of the run.
        times: Of the last of them.
        ranks: What has run them.
        hint: What more micro-batches would win; "" where that is nothing.

    Example:
        >>> times = [StepTime(1.1, 1.0, (0.9, 0.8), 4)] * 3
        >>> for line in describe_run(60, times, Ranks()):
        ...     print(line)
        60 training steps, 1.10 s each (median of the last 3)
        forward and backward take 1.00 s of it; one rank of 1 thread would take about 1.70 s for the same 4 \
micro-batches, the computing of 2 ranks added up: 1.7 times as fast on 2 ranks
    """
    if len(times) < LEAST_TIMES:
        return []
    wall_s, run_s = median(each.wall_s for each in times), median(each.run_s for each in times)
    lines = [f"{num_steps} training steps, {format_seconds(wall_s)} each (median of the last {len(times)})"]
    if not ranks.is_timed:
        return [*lines, hint] if hint else lines
    num_ranks = ranks.num_groups * len(times[-1].busy_s)
    alone_s = ranks.num_groups * median(sum(each.busy_s) for each in times)
    what = "forward, backward and averaging gradients" if ranks.num_groups > 1 else "forward and backward"
    said = f"{what} take {format_seconds(run_s)} of it"
    threads = count_of(ranks.num_threads, "thread")
    if ranks.share_cores:
        cores = count_of(ranks.num_cores, "core")
        lines.append(f"{said}; {ranks.num_near} ranks of {threads} share {cores}: fewer ranks may be as fast")
        return [*lines, hint] if hint else lines
    gain = alone_s / run_s
    compared = (
        f"{gain:.1f} times as fast on {num_ranks} ranks"
        if gain > _SAME
        else f"{1 / gain:.1f} times as slow on {num_ranks} ranks"
        if gain * _SAME < 1
        else f"no faster on {num_ranks} ranks"
    )
    number = times[-1].num_micro_batches  # smaller ones may take longer in all than one batch would
    same = f" for the same {number} micro-batches" if number > 1 else ""
    lines.append(
        f"{said}; one rank of {threads} would take about {format_seconds(alone_s)}{same}, the computing of {num_ranks} "
        f"ranks added up: {compared}"
    )
    if hint:
        lines.append(hint)
    elif gain < _GOOD * num_ranks:
        may_cut = ranks.may_cut and len(times[-1].busy_s) > 1
        lines.append(_what_to_try(times, 1 - gain / num_ranks, may_cut=may_cut, is_slower=gain <= _SAME))
    return lines


def _what_to_try(times: Sequence[StepTime], idle: float, *, may_cut: bool, is_slower: bool) -> str:
    more = f", more micro-batches (a step has {count_of(times[-1].num_micro_batches, 'micro-batch')})"
    return (
        f"the ranks do not compute for {100 * idle:.0f} % of that: try larger batches{more * may_cut}"
        f"{', fewer ranks' * is_slower}; farspan run --report step.html shows where the time goes"
    )
