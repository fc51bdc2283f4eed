"""What a rank's process does for the launcher, before and after the script."""

__all__: list[str] = []
