"""What the planner says of a mesh, asked for a model at hand."""

__all__: list[str] = []
