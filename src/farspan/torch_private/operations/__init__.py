"""Knows what torch says of its operations: what they write and draw, and which functions read no data."""

__all__: list[str] = []
