"""Exceptions as the user sees them."""

__all__: list[str] = []
