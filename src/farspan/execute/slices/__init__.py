"""Parameters in slices: each member of a split stage keeps its own, with gradient and optimizer state."""

__all__: list[str] = []
