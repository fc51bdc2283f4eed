"""Gradients that the program has set to memory which it uses by other names, too."""

__all__: list[str] = []
