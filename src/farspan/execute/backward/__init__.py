"""Runs backwards beyond what autograd does: catches what leaves a segment; splits a backward into input gradients now,
for those who wait for them, and weight gradients when there is time."""

__all__: list[str] = []
