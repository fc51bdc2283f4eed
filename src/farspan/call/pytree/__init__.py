"""Any structure of objects as a template that can be compared, and the tensors in it."""

__all__: list[str] = []
