"""Searching where a user has hints: the same problem, with fewer ways to go."""

from farspan.planner.constraints.divide import divide as divide
from farspan.planner.constraints.problem import HintedProblem as HintedProblem
from farspan.planner.constraints.problem import hinted_problem as hinted_problem

__all__ = ["HintedProblem", "divide", "hinted_problem"]
