"""A plan and a model meet: at the start, and anew while the program runs, once its first step is measured."""

__all__: list[str] = []
