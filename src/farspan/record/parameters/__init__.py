"""A distributed model's parameters: placing them, their gradients, saving and loading them."""

__all__: list[str] = []
