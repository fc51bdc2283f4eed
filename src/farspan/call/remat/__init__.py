"""Activations that are let go after the forward, and computed again when the backward asks for them."""

__all__: list[str] = []
