"""Runs in a rank's process for the launcher, before and after the script."""

__all__: list[str] = []
