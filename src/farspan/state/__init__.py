"""What a program has learned, on disk: checkpoints, and what makes a program go on exactly where it was."""

__all__: list[str] = []
