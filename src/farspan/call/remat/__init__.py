"""Activations that are released after the forward, and computed again when the backward asks for them."""

__all__: list[str] = []
