"""A lower bound on the max-load of any placement, contiguous or not."""

from __future__ import annotations

from benchmarks.planner_placement.placement.problem import Problem

from farspan.planner.cost_model.bounds import best_weights

__all__ = ["simple_bound"]


def simple_bound(problem: Problem) -> float:
    """The larger of: all work spread over all devices in fractions; the heaviest group on its fastest device."""
    _, work = best_weights(problem.time_s, problem.counts)
    heaviest = float(problem.time_s.min(axis=1).max())
    return max(float(work.sum()), heaviest)
