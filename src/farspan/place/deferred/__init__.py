"""Deferred construction: a model is built without its data, and each process makes what it owns, bit for bit."""

__all__: list[str] = []
