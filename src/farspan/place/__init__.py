"""A plan and a model meet: at the start, and once the first step is measured."""

__all__: list[str] = []
