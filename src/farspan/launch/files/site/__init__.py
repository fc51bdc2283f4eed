"""The folder that `farspan run` puts on PYTHONPATH."""

__all__: list[str] = []
