"""What no plan of consecutive stages, as the search makes them, is below."""

from farspan.planner.bound.lower_bound import Bound as Bound
from farspan.planner.bound.lower_bound import bound_of as bound_of

__all__ = ["Bound", "bound_of"]
