"""The hub of the side channel, which rank 0 hosts for all: a state machine and a server."""

__all__: list[str] = []
