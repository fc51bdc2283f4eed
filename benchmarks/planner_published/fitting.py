"""Fitting on logarithms, and the two measures: the median error and the rank correlation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy.optimize import least_squares

__all__ = ["fit", "median_error", "spearman"]

SOFT = 0.05
"""Errors beyond this (relative) count less than their square."""


def fit(
    predict: Callable[[dict[str, float]], Sequence[float]],
    measured: Sequence[float],
    ranges: Mapping[str, tuple[float, float, float]],
) -> dict[str, float]:
    """The parameters, each within (low, start, high) of `ranges`, with the least soft squares of log errors."""
    low, start, high = np.log(np.array(list(ranges.values()))).T
    wanted = np.log(measured)

    def named(point: np.ndarray) -> dict[str, float]:
        return {name: float(math.exp(value)) for name, value in zip(ranges, point, strict=True)}

    found = least_squares(
        lambda point: np.log(predict(named(point))) - wanted, start, bounds=(low, high), loss="soft_l1", f_scale=SOFT
    )
    return named(found.x)


def median_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    return float(np.median(np.abs(np.array(predicted) / np.array(measured) - 1)))


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The correlation of ranks; equal values share the mean of theirs."""
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < value for other in values) + sum(other == value for other in values) / 2 for value in values]
