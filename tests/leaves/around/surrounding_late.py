"""A file of a program that nobody imports but a module, while it runs."""

RATE = 0.0


class Settings:
    """A name for variables."""

    rate = 0.0
