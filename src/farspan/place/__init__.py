"""A plan and a model meet: at the start, and the model is repartitioned while the program runs, once its first step is measured."""

__all__: list[str] = []
