"""Searching where a user has hints: the same problem, with fewer ways to go."""

from farspan.planner.hinted.divide import divide as divide
from farspan.planner.hinted.problem import HintedProblem as HintedProblem
from farspan.planner.hinted.problem import hinted_problem as hinted_problem

__all__ = ["HintedProblem", "divide", "hinted_problem"]
