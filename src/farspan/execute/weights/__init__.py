"""Parameters of wide stages: their values on all members, and their gradients on the way home."""

__all__: list[str] = []
