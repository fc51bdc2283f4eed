"""Slices of parameters that members of split stages own themselves."""

__all__: list[str] = []
