"""What one rank alone knows, and tells the others."""

__all__: list[str] = []
