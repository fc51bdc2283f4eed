"""Going on after a loss: the groups of ranks that are whole go on in their processes, each with all of the model."""

__all__: list[str] = []
