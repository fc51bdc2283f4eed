"""Compares the speeds of the ranks' devices by what they took for the same work.

    rank 0, block A  10 ms     rank 1, block A  20 ms         speed of rank 1: 0.5
    rank 1, block B  30 ms     rank 2, block B  15 ms         speed of rank 2: 1.0

log seconds(kind, rank) = log cost(kind) - log speed(rank), by least squares.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import numpy as np

from farspan.place.repartition.gathered_profile import RankMeasured

__all__ = ["speeds_of_ranks"]

_ALIKE = 1.2
"""Ratio up to which devices count as equally fast: what else runs on a machine makes as much of a difference."""


def speeds_of_ranks(shares: Sequence[RankMeasured]) -> list[float]:
    """Returns speeds by rank; ranks that have no kind of work in common with others count as the others.

    Args:
        shares: By rank, what was measured.
    """
    rows = [(kind, rank, seconds) for rank, share in enumerate(shares) for kind, seconds in _seconds(share).items()]
    ranks_of: dict[str, set[int]] = defaultdict(set)
    for kind, rank, _ in rows:
        ranks_of[kind].add(rank)
    rows = [row for row in rows if len(ranks_of[row[0]]) > 1]
    if not rows:
        return [1.0] * len(shares)
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(kind for kind, _, _ in rows))}
    matrix = np.zeros((len(rows), len(kinds) + len(shares)))
    for row, (kind, rank, _) in enumerate(rows):
        matrix[row, kinds[kind]], matrix[row, len(kinds) + rank] = 1.0, -1.0
    found = np.linalg.lstsq(matrix, np.log([seconds for _, _, seconds in rows]), rcond=None)[0][len(kinds) :]
    known = {rank for _, rank, _ in rows}
    middle = median(float(found[rank]) for rank in known)
    # In steps, so that devices that differ by noise alone are of one class.
    steps = [
        round((float(found[rank]) - middle) / math.log(_ALIKE)) if rank in known else 0 for rank in range(len(shares))
    ]
    return [_ALIKE**step for step in steps]


def _seconds(share: RankMeasured) -> dict[str, float]:
    """Returns for each kind of segment the least that its forward took: what else runs on a machine only adds to it."""
    measured = share.measured
    taken: dict[str, list[float]] = defaultdict(list)
    for sample in measured.samples:
        note = measured.notes.get(sample.key)
        if note is not None and sample.kind == "F" and sample.number > 0 and sample.seconds > 0:
            taken[note.likeness].append(sample.seconds)
    return {kind: min(seconds) for kind, seconds in taken.items()}
