"""What all ranks do alike, and how a difference between them is found and named."""

__all__: list[str] = []
