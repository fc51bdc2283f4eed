"""What torch says of its operations: what they write and draw, and which functions look at no data."""

__all__: list[str] = []
