"""Executes what was recorded, on one rank, while the program runs: steps, values, optimizers."""

__all__: list[str] = []
