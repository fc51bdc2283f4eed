"""Operations that the members of a split stage do in a way of their own, since no member's part gives a part."""

__all__: list[str] = []
