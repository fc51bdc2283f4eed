"""Tensors on their way between ranks: those of a step as `router` chooses, those that a rank asks for by `pulls`."""

__all__: list[str] = []
