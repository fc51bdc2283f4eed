"""Running Python becomes graphs: lazy tensors, the recorder, and where calls are caught."""

__all__: list[str] = []
