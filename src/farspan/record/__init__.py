"""Records running Python as graphs: lazy tensors, the recorder, and where calls are intercepted."""

__all__: list[str] = []
