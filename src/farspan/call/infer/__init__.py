"""What a call will give, found out before it runs."""

__all__: list[str] = []
