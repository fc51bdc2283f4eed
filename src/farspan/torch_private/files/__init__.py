"""What torch's own code does with files."""

__all__: list[str] = []
