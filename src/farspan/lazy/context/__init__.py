"""What the program puts around calls: torch's flags, hooks on saved tensors, modes, transformations."""

__all__: list[str] = []
