"""Seconds of work on a device that is not at hand: each operation takes as long as its products or its memory traffic.

    seconds = sum over operations of max(flops / (reached * peak), bytes / (reached * bandwidth), least)

S. Williams et al., Roofline: an insightful visual performance model, 2009. Operations are those that torch runs one by
one, so nothing is fused.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from farspan.cluster import Speeds
from farspan.profile.step import Operation

__all__ = ["roofline_s", "speeds_here"]

_REACHED_FLOPS, _REACHED_BANDWIDTH = 0.6, 0.8
"""Shares of the data sheet's figures that large products, and long rows of numbers, reach."""
_HALF = ("float16", "bfloat16")
_SIZE, _REPETITIONS = 384, 3


def roofline_s(work: Iterable[Operation], speeds: Speeds) -> float:
    """Returns seconds of `work` on a device of those speeds.

    >>> speeds = Speeds(flops_per_s=1e12, half_flops_per_s=2e12, memory_bytes_per_s=1e11)
    >>> round(roofline_s([Operation(flops=6e11, moved_bytes=1e9, dtype="float32")], speeds), 6)
    1.0
    """
    return sum(
        max(
            each.flops / (_REACHED_FLOPS * (speeds.half_flops_per_s if each.dtype in _HALF else speeds.flops_per_s)),
            each.moved_bytes / (_REACHED_BANDWIDTH * speeds.memory_bytes_per_s),
            speeds.least_s,
        )
        for each in work
    )


def speeds_here() -> Speeds:
    """Returns the speeds of this process on the CPU, measured in a few hundredths of a second."""
    a = torch.ones(_SIZE, _SIZE)
    row = torch.ones(1 << 22)
    product_s = min(_seconds(lambda: torch.mm(a, a)) for _ in range(_REPETITIONS))
    copy_s = min(_seconds(row.clone) for _ in range(_REPETITIONS))
    flops = 2 * _SIZE**3 / product_s / _REACHED_FLOPS
    bandwidth = 2 * row.numel() * row.element_size() / copy_s / _REACHED_BANDWIDTH
    start_s = min(_seconds(lambda: a[0, :8].neg()) for _ in range(_REPETITIONS))
    return Speeds(flops_per_s=flops, half_flops_per_s=flops, memory_bytes_per_s=bandwidth, least_s=start_s)


def _seconds(function: object) -> float:
    assert callable(function)
    began = time.perf_counter()
    function()
    return time.perf_counter() - began
