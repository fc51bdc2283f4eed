"""Searches over contiguous stages: dynamic programming over a lattice of prefixes of the graph."""

from __future__ import annotations

__all__: list[str] = []
