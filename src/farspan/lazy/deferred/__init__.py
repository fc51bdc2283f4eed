"""Ops on values that have been computed, which are recorded only when a recorded call needs them."""

from farspan.lazy.deferred.deferred import Deferred as Deferred

__all__ = ["Deferred"]
