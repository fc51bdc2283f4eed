"""A lower bound on the load of the busiest device: all work, spread over all devices in fractions.

For weights w(c) >= 0 with sum over classes of count(c) w(c) = 1, no plan has a smaller largest load than

    sum over groups g of  min over classes c of  w(c) time(g, c)

(the largest load is at least the weighted mean of all loads, and group g adds at least that much to it). This is the
dual of spreading all work over all devices in fractions; the best weights make it as large as that optimum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from farspan.planner.cost_model.colocation import FloatArray

__all__ = ["best_weights"]


def best_weights(time_s: FloatArray, num_devices: Sequence[int]) -> tuple[FloatArray, FloatArray]:
    """Weights of the classes, and for each group what it adds to the bound: min over c of w(c) time(g, c)."""
    counts = np.array(num_devices, dtype=float)
    num_classes = len(counts)
    speed = 1.0 / np.maximum(np.where(np.isfinite(time_s), time_s, 0.0).sum(axis=0), 1e-30)
    best = _normal(np.maximum(speed, 1e-30), counts)
    value = _bound(time_s, best)
    # Coordinate search on the logarithms of the weights: the bound is concave in the weights.
    step = math.log(4.0)
    while step > 1e-4 and num_classes > 1:
        improved = False
        for index, sign in itertools.product(range(num_classes), (1.0, -1.0)):
            factor = np.ones(num_classes)
            factor[index] = math.exp(sign * step)
            weights = _normal(best * factor, counts)
            found = _bound(time_s, weights)
            if found > value * (1 + 1e-12):
                best, value, improved = weights, found, True
        if not improved:
            step /= 2
    return best, _shares(time_s, best)


def _shares(time_s: FloatArray, weights: FloatArray) -> FloatArray:
    return (time_s * weights[None, :]).min(axis=1)


def _bound(time_s: FloatArray, weights: FloatArray) -> float:
    return float(_shares(time_s, weights).sum())


def _normal(weights: FloatArray, counts: FloatArray) -> FloatArray:
    return weights / float(weights @ counts)
