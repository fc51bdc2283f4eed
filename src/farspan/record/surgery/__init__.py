"""Follows what the program changes in a model's modules after `distribute`: tables, parts, parameters."""

__all__: list[str] = []
