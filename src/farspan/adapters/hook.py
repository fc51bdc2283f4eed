"""Doing something to a module of another package: at once if it is loaded, else right after it is."""

from __future__ import annotations

from farspan.launch.rank.imports import when_imported

__all__ = ["when_imported"]
