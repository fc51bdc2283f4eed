"""What torch's own code does with files, and to read data."""

__all__: list[str] = []
