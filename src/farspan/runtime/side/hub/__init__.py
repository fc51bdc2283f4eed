"""What rank 0 hosts for all: the hub of the side channel, as a state machine and as a server."""

from farspan.runtime.side.hub.state import Hub as Hub

__all__ = ["Hub"]
