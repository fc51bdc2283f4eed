"""Planted faults, and the tests that notice them."""

from __future__ import annotations

__all__: list[str] = []
