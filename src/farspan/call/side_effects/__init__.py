"""Finds and replays what a call does besides returning: to its arguments, to its modules, to objects and variables
beside them."""

__all__: list[str] = []
