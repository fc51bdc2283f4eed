"""Infers what a call will give before it runs."""

__all__: list[str] = []
