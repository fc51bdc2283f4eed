"""Splits each layer of a stage over the members of its team, operation by operation, as the model's Python runs."""

__all__: list[str] = []
