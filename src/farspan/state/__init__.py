"""Saves on disk what a program has trained: checkpoints, and all that makes a program go on exactly where it was."""

__all__: list[str] = []
