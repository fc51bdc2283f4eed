"""Copies tensors from memory to memory, between processes of one host."""

__all__: list[str] = []
