"""How templates hold values that do not say by `==` whether they are the same: by identity, or by their bits."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["ById", "is_told_by_bits"]


class ById:
    """An object compared by identity, kept alive by the template; a number is compared by its bits.

    >>> ById(-0.0) == ById(-0.0), ById(-0.0) == ById(0.0), ById([]) == ById([])
    (True, False, False)
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(repr(self.value)) if type(self.value) in (float, complex) else id(self.value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ById):
            return False
        if type(self.value) in (float, complex) and type(other.value) is type(self.value):
            return repr(other.value) == repr(self.value)
        return other.value is self.value

    def __repr__(self) -> str:
        kind = type(self.value)
        return f"<{kind.__module__}.{kind.__qualname__}>"


def is_told_by_bits(number: complex) -> bool:
    """Returns whether `==` does not tell if another number is the same: of NaN, and where a zero is negative.

    >>> [is_told_by_bits(number) for number in (0.0, -0.0, math.nan, 1.0, complex(1.0, -0.0))]
    [False, True, True, False, True]
    """
    parts = (number.real, number.imag)
    return any(part != part or (part == 0.0 and math.copysign(1.0, part) < 0.0) for part in parts)
