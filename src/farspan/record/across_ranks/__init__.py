"""Shares with all ranks what one rank alone knows."""

__all__: list[str] = []
