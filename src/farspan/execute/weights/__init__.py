"""Parameters of wide stages: their values on all members, and their gradients on the way to their owners."""

__all__: list[str] = []
