"""The shortest step that a condition allows, by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["CLOSE", "least_step"]

CLOSE = 1e-9


def least_step(
    is_enough: Callable[[float], bool], known_s: float, found_s: float = math.inf, *, close: float = CLOSE
) -> float:
    """Returns seconds for which the condition does not hold, or just so; at least those that are known.

    Args:
        is_enough: Whether so many seconds may be enough for a step; if some are, more are.
        known_s: No step takes less.
        found_s: There is a step of so many seconds, for which the condition holds. Infinite if none is known.
        close: The share by which what is returned may be less than it could be.
    """
    low, high = known_s, found_s
    if not math.isfinite(found_s):
        if is_enough(known_s) or not is_enough(math.inf):  # or there is no plan
            return known_s
        high = 2 * known_s
        while not is_enough(high):
            low, high = high, 2 * high
    while high - low > close * low:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return low
