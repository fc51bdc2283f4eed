"""Saving: what is saved, who writes it, how it becomes a checkpoint."""

__all__: list[str] = []
