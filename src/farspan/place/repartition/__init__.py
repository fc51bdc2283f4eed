"""A program's first steps measured on all its ranks, and its model repartitioned while it runs."""

__all__: list[str] = []
