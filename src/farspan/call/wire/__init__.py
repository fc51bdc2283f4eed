"""Structures and exceptions as text for other ranks, and what makes sure that nothing else is taken in."""

__all__: list[str] = []
