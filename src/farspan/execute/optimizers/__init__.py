"""Optimizers: their steps, and saving and loading what they keep."""

__all__: list[str] = []
