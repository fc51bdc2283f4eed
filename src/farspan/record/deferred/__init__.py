"""Ops on values that have been computed, which are recorded only when a recorded call needs them."""

__all__: list[str] = []
