"""Checks that all ranks do alike, and finds and names a difference between them."""

__all__: list[str] = []
