"""What rank 0 hosts for all: the hub of the side channel, as a state machine and as a server."""

__all__: list[str] = []
