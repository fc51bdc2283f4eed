"""TCP between the hosts of a run: where this one listens, and how both ends prove that they belong to the run."""

__all__: list[str] = []
