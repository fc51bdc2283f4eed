"""Loading: which checkpoint, which parts of it, in what order."""

__all__: list[str] = []
