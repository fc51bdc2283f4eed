"""Gradients that are recorded as calls, so that the program can go back through them: `create_graph=True`."""

__all__: list[str] = []
