"""Ranks that are forks of this process: for notebooks, where there is no script to start."""

__all__: list[str] = []
