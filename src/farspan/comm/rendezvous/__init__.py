"""How the processes of a job find each other: a store that all can reach, addresses, and the side channel."""

__all__: list[str] = []
