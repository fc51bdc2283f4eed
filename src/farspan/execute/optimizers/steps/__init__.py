"""Where the steps of an optimizer begin and end."""

__all__: list[str] = []
