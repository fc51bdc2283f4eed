"""A plan as a plain-text table: stage, where, what, and how much of the model that is.

2 stages on 2 ranks, 1f1b schedule
stage  where   what                        parameters      size  share
    0  rank:0  embed, blocks.0-blocks.3         3.2 M  12.1 MiB   49 %
    1  rank:1  blocks.4-blocks.7, head          3.2 M  12.3 MiB   51 %
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence

from farspan.units import count_of, format_bytes, format_count

__all__ = ["compress_runs", "format_numbers", "format_plan"]

_WHAT_WIDTH = 60
_NUMBERS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("parameters", "num_parameters", format_count),
    ("size", "parameter_bytes", format_bytes),
    ("share", "share", lambda share: f"{100 * share:.0f} %"),
    ("peak memory", "peak_bytes", format_bytes),
    ("limit", "limit_bytes", format_bytes),
    ("expected busy", "busy", lambda share: f"{100 * share:.0f} %"),
)


def format_plan(
    *,
    stages: Sequence[str],
    placement: Mapping[str, int],
    schedule: str,
    num_ranks: int,
    remat: bool | Sequence[str],
    estimates: Mapping[str, Sequence[float]],
) -> str:
    """Returns the table of a plan; columns of numbers only where there are estimates."""
    numbers = [(title, estimates[key], show) for title, key, show in _NUMBERS if key in estimates]
    head = ["stage", "where", "what", *(title for title, _, _ in numbers)]
    rows: list[list[str]] = [head]
    for stage, where in enumerate(stages):
        names = compress_runs([name for name, owner in placement.items() if owner == stage])
        lines = textwrap.wrap(", ".join(names), _WHAT_WIDTH, break_long_words=False, break_on_hyphens=False) or ["-"]
        rows.append([str(stage), where, lines[0], *(show(row[stage]) for _, row, show in numbers)])
        rows.extend(["", "", line, *("" for _ in numbers)] for line in lines[1:])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    title = f"{count_of(len(stages), 'stage')} on {count_of(num_ranks, 'rank')}, {schedule} schedule"
    return "\n".join([title, *_remat_lines(remat), *(_line(row, widths) for row in rows)])


def format_numbers(estimates: Mapping[str, Sequence[float]], stage: int) -> list[tuple[str, str]]:
    """Returns the known numbers of a stage: title and number."""
    return [(title, show(estimates[key][stage])) for title, key, show in _NUMBERS if key in estimates]


def _remat_lines(remat: bool | Sequence[str]) -> list[str]:
    if not remat:
        return []
    what = "each repeated block" if isinstance(remat, bool) else ", ".join(map(_shown, remat))
    return textwrap.wrap(
        f"computed again in the backward: {what}",
        2 * _WHAT_WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def compress_runs(names: Sequence[str]) -> list[str]:
    """Returns names with consecutive numbers drawn together.

    >>> compress_runs(["embed", "blocks.0", "blocks.1", "blocks.2", "norm"])
    ['embed', 'blocks.0-blocks.2', 'norm']
    """
    runs: list[tuple[str, str]] = []
    for name in names:
        if runs and _follows(runs[-1][1], name):
            runs[-1] = (runs[-1][0], name)
        else:
            runs.append((name, name))
    return [_shown(first) if first == last else f"{first}-{last}" for first, last in runs]


def _follows(name: str, following: str) -> bool:
    parent, _, number = name.rpartition(".")
    next_parent, _, next_number = following.rpartition(".")
    return parent == next_parent and number.isdecimal() and next_number == str(int(number) + 1)


def _shown(name: str) -> str:
    return name or "(the whole model)"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        cell.ljust(width) if column in (1, 2) else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()
