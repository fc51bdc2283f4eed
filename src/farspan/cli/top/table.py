"""The ranks of a run as a table that is shown again and again, and in a line whom the others wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.table import Table

from farspan.launch.rank.status import RankStatus
from farspan.units import format_bytes, format_seconds

__all__ = ["REST", "table_of", "waited_for"]

REST = "the rest of a step is the program's own, outside of forward and backward: its data, Python, optimizer"
_MUCH = 0.1
"""From this share of a step on it is said what the rest is."""
_LATE_STEPS = 3
"""After so many times its usual step a rank that has not ended another one is late."""
_LEAST_LATE_S = 5.0
_UNEVEN = 1.1
"""From this ratio of two ranks' computing on, one is what the others wait for."""


def waited_for(statuses: Sequence[RankStatus], now_s: float) -> str:
    """Returns in a line which rank the others wait for; "" where there is none.

    Args:
        statuses: Of all ranks, by rank.
        now_s: On the host's monotonic clock.
    """
    if not statuses:
        return ""
    furthest = max(status.step for status in statuses)
    behind = [status for status in statuses if status.step < furthest]
    last = max(statuses, key=lambda status: status.ended_s)
    silent_s = now_s - last.ended_s
    if silent_s > max(_LEAST_LATE_S, _LATE_STEPS * last.period_s):
        names = ", ".join(str(status.rank) for status in behind)
        who = f"rank {names} has not ended step {furthest}" if behind else f"no rank has ended step {furthest + 1}"
        return f"{who}; the last step ended {format_seconds(silent_s)} ago (kill -USR1 {last.pid} shows where all are)"
    slowest = max(statuses, key=lambda status: status.compute_s)
    others = [status.compute_s for status in statuses if status is not slowest]
    if not others or slowest.compute_s <= _UNEVEN * max(others):
        return ""
    if slowest.wait_s >= min(status.wait_s for status in statuses if status is not slowest):
        return ""
    return (
        f"the others wait for rank {slowest.rank}: it computes {format_seconds(slowest.compute_s)} of a step, "
        f"the next {format_seconds(max(others))}"
    )


def table_of(statuses: Sequence[RankStatus], memory: Mapping[int, int | None], now_s: float) -> Group:
    """Returns a row for each rank, and the line of `waited_for`.

    Args:
        statuses: Of all ranks, by rank.
        memory: Resident bytes by process; None of a process that has ended.
        now_s: On the host's monotonic clock.
    """
    table = Table(box=None, pad_edge=False)
    for head in ("rank", "step", "steps/s", "micro-batches/s", "computes", "waits", "memory", "last step"):
        table.add_column(head, justify="right", no_wrap=True)
    for status in statuses:
        resident = memory.get(status.pid)
        table.add_row(
            str(status.rank),
            str(status.step),
            _rate(1, status.period_s),
            _rate(status.micro_batches, status.period_s),
            _share(status.compute_s, status),
            _share(status.wait_s, status),
            "ended" if resident is None else format_bytes(resident),
            f"{format_seconds(max(0.0, now_s - status.ended_s))} ago",
        )
    is_over = all(size is None for size in memory.values())
    lines = ["the run is over" if is_over else waited_for(statuses, now_s), _rest(statuses)]
    return Group(table, *filter(None, lines))


def _rest(statuses: Sequence[RankStatus]) -> str:
    """Returns in a line what else a step is, where that is much of it; "" where it is little."""
    rests = [1 - (each.compute_s + each.wait_s) / each.period_s for each in statuses if each.period_s]
    return REST if max(rests, default=0.0) >= _MUCH else ""


def _rate(number: int, period_s: float) -> str:
    return f"{number / period_s:.2f}" if period_s else "-"


def _share(seconds: float, status: RankStatus) -> str:
    return f"{100 * seconds / status.period_s:.0f} %" if status.period_s else format_seconds(seconds)
