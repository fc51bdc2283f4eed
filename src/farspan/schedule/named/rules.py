"""What the name of a schedule decides besides the order: which backwards are split, and how far a rank runs ahead.

All ranks decide alike, and so does the planner, which plays the same orders: from the work there is, not from seconds.
"""

from __future__ import annotations

import math

__all__ = ["LEAST_WEIGHT_WORK_S", "LOOKAHEAD", "NOMINAL_S", "SPLIT_COST_S", "is_worth_splitting", "run_ahead_of"]

LEAST_WEIGHT_WORK_S = {"auto": 2e-3, "zero-bubble": 0.0, "1f1b": math.inf, "gpipe": math.inf}
"""By schedule: a backward is split if its weight gradients are likely to take so long. Splitting costs 0.3 ms for each
block of a transformer: putting off should save more."""
LOOKAHEAD = 2
"""How many boundary buffers a rank may hold beyond one for each stage, to hide transfers."""
NOMINAL_S = 1.0
"""Of a forward, of input gradients, of weight gradients: what orders are made for. All ranks know them, and noise does
not change them."""
SPLIT_COST_S = 0.1 * NOMINAL_S
"""What splitting a backward costs besides: a tenth of its weight gradients, for blocks of a transformer on a CPU."""
_NOT_AHEAD = ("gpipe", "1f1b")
_FLOPS_PER_S = {"cpu": 2e10, "cuda": 2e13}
"""Of one core, of one GPU, as models use them: an order of magnitude."""


def is_worth_splitting(flops: float, device: str, least_s: float) -> bool:
    """Whether weight gradients are worth a task of their own.

    Args:
        flops: Of the forward of what has weights: a product takes as many for the gradient of either side.
        device: "cpu"; all others count as GPUs.
        least_s: See `LEAST_WEIGHT_WORK_S`.
    """
    return flops / _FLOPS_PER_S.get(device, _FLOPS_PER_S["cuda"]) >= least_s


def run_ahead_of(schedule: str, lookahead: int = LOOKAHEAD) -> int:
    """How many forwards more than it needs a schedule has in flight; the rest of `lookahead` is for receives that are
    posted so many tasks ahead: one, or all where the schedule is GPipe or 1F1B, which do not run ahead.
    """
    return 0 if schedule in _NOT_AHEAD else max(0, lookahead - 1)
