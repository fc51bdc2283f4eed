"""Proves, by a rule for each operation, that the rows of a batch stay apart in a module's call, forward and
backward."""

__all__: list[str] = []
