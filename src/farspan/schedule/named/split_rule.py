"""Nominal durations for making orders, and the rule for which backwards are worth splitting.

All ranks decide alike, and so does the planner, which simulates the same orders: from the work there is, not from
seconds.
"""

from __future__ import annotations

__all__ = ["LOOKAHEAD", "NOMINAL_S", "SPLIT_COST_S", "is_worth_splitting"]

LOOKAHEAD = 2
"""How many boundary buffers a rank may hold beyond one for each stage, to hide transfers."""
NOMINAL_S = 1.0
"""The duration of a forward, of input gradients and of weight gradients for which orders are made. All ranks know it,
and noise does not change it."""
SPLIT_COST_S = 0.1 * NOMINAL_S
"""The extra cost of splitting a backward: a tenth of its weight gradients, for blocks of a transformer on a CPU."""
_CPU_FLOPS_PER_S, _FLOPS_PER_S = 2e10, 2e13
"""Speed of one CPU core, and of one GPU or other accelerator, as models use them: an order of magnitude."""


def is_worth_splitting(flops: float, device: str, least_s: float) -> bool:
    """Returns whether weight gradients are worth a task of their own.

    Args:
        flops: Of the forward of what has weights: a product takes as many for the gradient of either side.
        device: "cpu"; all others count as GPUs.
        least_s: See `NamedSchedule.least_weight_work_s`.
    """
    return flops / (_CPU_FLOPS_PER_S if device == "cpu" else _FLOPS_PER_S) >= least_s
