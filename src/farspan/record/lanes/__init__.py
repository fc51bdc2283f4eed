"""A batch of a plain loop, recorded as several micro-batches."""

__all__: list[str] = []
