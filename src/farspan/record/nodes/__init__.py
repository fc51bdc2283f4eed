"""Shows autograd's graph to the program: hooks on recorded tensors, and on the nodes that have made them."""

__all__: list[str] = []
