"""A timeline for terminals: one line, or one lane of ASCII per rank."""

from __future__ import annotations

from farspan.report.timeline import TASKS, Kind, Timeline
from farspan.units import format_seconds

__all__ = ["format_share", "lanes", "summary"]

_MOST_RANKS_IN_A_LINE = 8

# Painted in this order, so that a task is never hidden behind what merely surrounds it.
_FILL: dict[Kind, str] = {"wait": ".", "F": "-", "B": "=", "W": "+"}


def format_share(share: float, digits: int = 0) -> str:
    """Returns a share of 1 in per cent.

    >>> format_share(0.0912, 1)
    '9.1 %'
    """
    return f"{100 * share:.{digits}f} %"


def summary(timeline: Timeline) -> str:
    """Returns the step in one line: its time, its bubble, how busy each rank was (a range for many ranks).

    >>> from farspan.report.timeline import Span
    >>> task = Span(rank=0, kind="F", name="a", micro_batch=0, start_ns=0, end_ns=30_000_000)
    >>> summary(Timeline(spans=(task,), num_ranks=2))
    '30.0 ms | bubble 50.0 % | busy 100 % 0 %'
    """
    if not timeline.duration_s:
        return "no tasks"
    shares = [timeline.busy_share(rank) for rank in range(timeline.num_ranks)]
    if len(shares) <= _MOST_RANKS_IN_A_LINE:
        busy = " ".join(format_share(share) for share in shares)
    else:
        busy = f"{100 * min(shares):.0f} to {format_share(max(shares))} on {len(shares)} ranks"
    return f"{format_seconds(timeline.duration_s)} | bubble {format_share(timeline.bubble, 1)} | busy {busy}"


def lanes(timeline: Timeline, *, width: int = 100) -> str:
    """Returns the timeline as ASCII, one line per rank, at most `width` columns.

    `F0--` is the forward of micro-batch 0, `B0==` its backward, `W0++` its weight gradients, dots are waits, blanks
    idle.

        rank 0  F0---F1---.....B0=====......B1=====   71 %
        rank 1  .....F0-B0=====F1---B1======          64 %
                0                           70.0 ms
    """
    if not timeline.spans:
        return "no tasks"
    start_ns, end_ns = timeline.window_ns
    label_width = max(map(len, map(timeline.name_of, range(timeline.num_ranks)))) + 2
    columns = max(20, width - label_width - len("  100 %"))
    columns_per_ns = columns / max(1, end_ns - start_ns)

    lines: list[str] = []
    rows = [[" "] * columns for _ in range(timeline.num_ranks)]
    for kind, fill in _FILL.items():
        for span in timeline.spans:
            if span.kind != kind:
                continue
            first = min(columns, max(0, round((span.start_ns - start_ns) * columns_per_ns)))
            last = min(columns, max(first, round((span.end_ns - start_ns) * columns_per_ns)))
            label = f"{kind}{span.micro_batch}" if kind in TASKS else ""
            if span.micro_batch < 0 or len(label) > last - first:
                label = label[:1]
            rows[span.rank][first:last] = label.ljust(last - first, fill)[: last - first]
    for rank, row in enumerate(rows):
        share = format_share(timeline.busy_share(rank))
        lines.append(timeline.name_of(rank).ljust(label_width) + "".join(row) + share.rjust(len("  100 %")))
    end = format_seconds((end_ns - start_ns) / 1e9)
    lines.append(" " * label_width + "0" + end.rjust(columns - 1))
    return "\n".join(lines)
