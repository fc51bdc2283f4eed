"""Reads other ranks' parameters."""

__all__: list[str] = []
