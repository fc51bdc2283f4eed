"""Knows what a recorded call is, what it will give before it runs, and how it runs."""

__all__: list[str] = []
