"""What this rank reads of other ranks' parameters."""

__all__: list[str] = []
