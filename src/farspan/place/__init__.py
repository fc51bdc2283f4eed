"""Applies a plan to a model: at the start, and once the first step is measured."""

__all__: list[str] = []
