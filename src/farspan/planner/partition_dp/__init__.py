"""The searches: over contiguous stages (a lattice of prefixes) and over free placements."""

from __future__ import annotations

__all__: list[str] = []
