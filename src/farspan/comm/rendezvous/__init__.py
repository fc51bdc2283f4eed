"""Rendezvous of the processes of a job: a store that all can reach, addresses, and the side channel."""

__all__: list[str] = []
