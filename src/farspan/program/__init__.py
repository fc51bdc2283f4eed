"""The program of a step: who does what, when, and which messages go between ranks."""

__all__: list[str] = []
