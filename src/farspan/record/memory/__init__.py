"""Tracks which tensors of the program share memory, and what becomes of the others when one is written or rebound."""

__all__: list[str] = []
