"""Runs this process among its peers: how it joins them, what it shows, how its program ends."""

__all__: list[str] = []
