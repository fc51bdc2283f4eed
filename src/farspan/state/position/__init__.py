"""Saves where a program stands in its data."""

__all__: list[str] = []
