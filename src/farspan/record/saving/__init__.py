"""State dictionaries on their way into a file: memory that is filled when it is used, one tensor after the other."""

__all__: list[str] = []
