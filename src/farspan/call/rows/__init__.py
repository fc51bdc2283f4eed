"""Whether the rows of a batch stay apart in a module's call, forward and backward, by a rule for each operation."""

__all__: list[str] = []
