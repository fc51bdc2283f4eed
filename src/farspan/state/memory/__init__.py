"""Checkpoints in memory that outlives the processes of a run: `farspan.save(..., memory=True)`."""

__all__: list[str] = []
