"""Asks the planner how ranks are best used, for a model at hand."""

__all__: list[str] = []
