"""What another rank has sent: checked, and made only of what this rank's own program knows."""

__all__: list[str] = []
