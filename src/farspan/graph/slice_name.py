"""The name of a slice of a parameter, which a member of a split stage uses in the place of the whole."""

from __future__ import annotations

from typing import Self

__all__ = ["SliceName", "whole_name"]


class SliceName(str):
    """A name by which ranks know a slice; as text "blocks.0.fc.weight[0: 8:16]" (dimension 0, from 8 to 16).

    Attributes:
        whole: Name of the parameter.
        dim: Along which it is cut.
        begin: First number in the slice.
        end: First number behind it.
    """

    __slots__ = ("begin", "dim", "end", "whole")

    def __new__(cls, whole: str, dim: int, begin: int, end: int) -> Self:
        name = super().__new__(cls, f"{whole}[{dim}: {begin}:{end}]")
        name.whole, name.dim, name.begin, name.end = whole, dim, begin, end
        return name


def whole_name(name: str) -> str:
    """Returns the name of the parameter that `name` means, or means a slice of."""
    return name.whole if type(name) is SliceName else name
