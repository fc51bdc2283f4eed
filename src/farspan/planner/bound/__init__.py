"""What no plan that distribute can run is below."""

from farspan.planner.bound.lower import lower_bound as lower_bound

__all__ = ["lower_bound"]
