"""Splitting a backward: input gradients now, for whoever waits for them; weight gradients when there is time."""

__all__: list[str] = []
