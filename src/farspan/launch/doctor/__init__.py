"""`farspan doctor`: looks at the hosts of a run before it is started, and says what would be in its way."""

__all__: list[str] = []
