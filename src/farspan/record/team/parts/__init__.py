"""How operations are done part by part: which part is whose, and whether parts give the whole."""

__all__: list[str] = []
