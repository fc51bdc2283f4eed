"""The side channel of one group of ranks, beside that of all of them."""

__all__: list[str] = []
