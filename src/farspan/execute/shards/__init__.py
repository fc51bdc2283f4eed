"""Sharding over the data axis: of what the groups would all hold, each holds a share."""

__all__: list[str] = []
