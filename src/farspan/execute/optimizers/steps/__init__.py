"""Steps that are called in another way than by the loop."""

__all__: list[str] = []
