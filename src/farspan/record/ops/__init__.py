"""Functions that recording must treat apart: lists, in-place writes, autograd functions, readers."""

__all__: list[str] = []
