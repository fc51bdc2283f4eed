"""The folder that `farspan run` puts on PYTHONPATH, for what every Python of a job does at its start."""

__all__: list[str] = []
