"""Cutting a chain of costs into contiguous parts, so that the largest part is as small as it can be.

With s(i, j) the cost of items i .. j-1, and at least one item in each part:

    best(1, j) = s(0, j)
    best(p, j) = min over i < j of max(best(p - 1, i), s(i, j))

best(p - 1, i) grows with i and s(i, j) shrinks, so the minimum lies where they cross: a binary search, and
num_parts * n * log(n) steps in all. Of all cuts whose largest part is that small, the second pass takes the one with,
in this order, the smallest sum of cut costs, the smallest sum of squared part costs, the smallest sum of squared part
lengths: even parts. It looks only at parts that are small enough, about n * n steps in all.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from farspan.errors import PlanError

__all__ = ["partition"]

_Score = tuple[float, float, int]  # sums of: cut costs, squared part costs, squared part lengths
_IMPOSSIBLE: _Score = (math.inf, math.inf, 0)


def partition(
    costs: Sequence[float], num_parts: int, *, cut_costs: Sequence[float] | None = None, slack: float = 0.0
) -> list[int]:
    """Cut `costs` into `num_parts` contiguous parts with the smallest possible largest part (exactly).

    Args:
        costs: Cost of each item, finite and not negative.
        num_parts: How many parts; none will be empty.
        cut_costs: What a cut before each item costs (the first is not used); nothing by default. It decides only
            among cuts whose largest part is small enough.
        slack: How much larger than necessary the largest part may be where that makes the cuts cheaper, as a share
            of 1.

    Returns:
        For each item the index of its part: 0 .. num_parts - 1, never decreasing.

    Raises:
        PlanError: There are fewer items than parts, or a cost is negative or not finite.

    Example:
        >>> partition([1, 2, 3, 4, 5], 2)
        [0, 0, 0, 1, 1]
        >>> partition([4, 8, 4, 8.1], 2, cut_costs=[0, 2, 1, 2], slack=0.05)
        [0, 0, 1, 1]
    """
    if num_parts < 1 or num_parts > len(costs):
        raise PlanError(
            f"{len(costs)} items cannot be cut into {num_parts} parts.",
            why="every part needs at least one item, and there must be at least one part.",
            hint=f"{max(len(costs), 1)} parts or fewer",
        )
    for index, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise PlanError(f"the cost of item {index} is {cost}.", why="a cost is a finite number from 0.")
    before = [0.0, *accumulate(float(cost) for cost in costs)]
    limit = _smallest_largest_part(before, num_parts)
    cuts = [0.0] * len(costs) if cut_costs is None else list(cut_costs)
    cut_cost, ends = _even_cuts(before, num_parts, limit, cuts)
    if slack > 0:
        cheaper_cost, cheaper_ends = _even_cuts(before, num_parts, limit * (1 + slack), cuts)
        if cheaper_cost < cut_cost:
            ends = cheaper_ends
    return [part for part, (start, end) in enumerate(zip([0, *ends], ends, strict=False)) for _ in range(start, end)]


def _smallest_largest_part(before: Sequence[float], num_parts: int) -> float:
    """Returns the largest part of the best cut. `before[j]` is the cost of the first j items."""
    num_items = len(before) - 1
    best = list(before)
    for part in range(2, num_parts + 1):
        previous, best = best, [math.inf] * (num_items + 1)
        for end in range(part, num_items + 1):
            # The first cut at which the parts before cost at least as much as the last part; and the one before it.
            first = bisect_left(
                range(part - 1, end), 0.0, key=lambda cut, end=end: previous[cut] - (before[end] - before[cut])
            )
            cuts = [cut for cut in (part - 2 + first, part - 1 + first) if part - 1 <= cut < end]
            best[end] = min(max(previous[cut], before[end] - before[cut]) for cut in cuts)
    return best[num_items]


def _even_cuts(
    before: Sequence[float], num_parts: int, limit: float, cut_costs: Sequence[float]
) -> tuple[float, list[int]]:
    """Returns the cheapest, then most even cut with no part above `limit`: sum of cut costs, and where each part
    ends."""
    num_items = len(before) - 1
    best: list[_Score] = [(0.0, 0.0, 0), *[_IMPOSSIBLE] * num_items]
    choices: list[list[int]] = []
    for part in range(1, num_parts + 1):
        previous, choice = best, [0] * (num_items + 1)
        best = [_IMPOSSIBLE] * (num_items + 1)
        for end in range(part, num_items + 1 - (num_parts - part)):
            for start in range(end - 1, part - 2, -1):
                size = before[end] - before[start]
                if size > limit:
                    break
                cuts, squares, lengths = previous[start]
                found = (
                    cuts + (cut_costs[start] if start else 0.0),
                    squares + size * size,
                    lengths + (end - start) ** 2,
                )
                if found < best[end]:
                    best[end], choice[end] = found, start
        choices.append(choice)
    ends = [num_items]
    for choice in reversed(choices[1:]):
        ends.append(choice[ends[-1]])
    return best[num_items][0], ends[::-1]
