"""Rows of stages that have fewer stages than there are ranks: cuts and widths, so that the slowest stage is as fast
as can be.

    best(j, r) = min over i < j and w <= r of max(best(i, r - w), (cost of i .. j) / w)     units, ranks; by stage

A stage of width w takes w micro-batches in the time in which a stage of one rank takes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

__all__ = ["cuts_and_widths"]


def cuts_and_widths(costs: Sequence[float], num_stages: int, num_ranks: int) -> tuple[list[int], list[int]]:
    """Divide units into a row of stages, and ranks among the stages.

    Args:
        costs: Of each unit, in the order in which they run.
        num_stages: How many stages; at most as many as there are units.
        num_ranks: How many ranks; at least as many as stages.

    Returns:
        The stage of each unit, and the width of each stage. Of those as fast the one with the earliest cuts, and the
        narrowest first stages.

    Example:
        >>> cuts_and_widths([3.0, 1.0], 2, 4)
        ([0, 1], [3, 1])
        >>> cuts_and_widths([1.0, 1.0, 4.0, 1.0], 2, 3)
        ([0, 0, 1, 1], [1, 2])
    """
    before = [0.0, *accumulate(costs)]
    count = len(costs)
    found = {(0, 0): (0.0, (0, 0))}
    """By units and ranks that are used: the slowest stage, and the units and ranks before the last stage."""
    rows = [found]
    for stage in range(1, num_stages + 1):
        left = num_stages - stage
        row: dict[tuple[int, int], tuple[float, tuple[int, int]]] = {}
        for (begin, used), (slowest, _) in rows[-1].items():
            for end in range(begin + 1, count - left + 1) if left else (count,):
                for width in range(1, num_ranks - used - left + 1) if left else (num_ranks - used,):
                    cost = max(slowest, (before[end] - before[begin]) / width)
                    key = (end, used + width)
                    if key not in row or cost < row[key][0]:
                        row[key] = (cost, (begin, used))
        rows.append(row)
    stage_of, widths = [0] * count, [0] * num_stages
    end, used = count, num_ranks
    for stage in range(num_stages - 1, -1, -1):
        begin, ranks = rows[stage + 1][end, used][1]
        stage_of[begin:end] = [stage] * (end - begin)
        widths[stage] = used - ranks
        end, used = begin, ranks
    return stage_of, widths
