"""Templates with holes in the place of their whole numbers: equal for calls that differ in sizes only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from farspan.call.pytree.template import ATOM

__all__ = ["HOLE", "fill_holes", "numbers_of"]

HOLE = (ATOM, int)
"""Where a whole number was in a template."""


def numbers_of(part: Any, found: list[Any]) -> Any:
    """`part` of a template with holes in the place of its whole numbers, which are appended to `found`."""
    if type(part) is not tuple:
        return part
    if len(part) == 3 and (part[1] is int or part[1] is torch.SymInt):
        found.append(part[2])
        return HOLE
    return tuple([numbers_of(item, found) for item in part])


def fill_holes(part: Any, numbers: Iterator[Any]) -> Any:
    """The template of which `numbers_of` has made `part`."""
    if type(part) is not tuple:
        return part
    if part is HOLE:
        number = next(numbers)
        return (ATOM, type(number), number)
    return tuple([fill_holes(item, numbers) for item in part])
