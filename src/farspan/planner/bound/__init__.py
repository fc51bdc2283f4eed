"""Bounds the step from below for all plans of consecutive stages, as the search makes them."""

from farspan.planner.bound.bisection import CLOSE as CLOSE
from farspan.planner.bound.lower_bound import Bound as Bound
from farspan.planner.bound.lower_bound import bound_of as bound_of

__all__ = ["CLOSE", "Bound", "bound_of"]
