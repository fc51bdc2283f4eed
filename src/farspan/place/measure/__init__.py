"""Running a program for its first steps only, to find out what they take."""

__all__: list[str] = []
