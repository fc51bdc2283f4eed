"""Going on after a loss in a world with wide stages: each member keeps copies of what another one owns."""

__all__: list[str] = []
