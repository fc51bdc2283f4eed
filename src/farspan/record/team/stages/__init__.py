"""Several stages of which one at least is split: where operations run, and what goes from one to another."""

__all__: list[str] = []
