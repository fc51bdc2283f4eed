"""Searches for placements that are not contiguous: annealing, branch and bound, an integer program."""

from __future__ import annotations

__all__: list[str] = []
