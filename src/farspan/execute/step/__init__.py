"""Runs one step on one rank: its program, its tasks, its messages."""

__all__: list[str] = []
