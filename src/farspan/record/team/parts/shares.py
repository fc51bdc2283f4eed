"""Which part of a dimension is a member's: equal ones, or where they cannot be, the first members have one more.

8 columns for 2 ranks     0..4  4..8
7 columns for 3 ranks     0..3  3..5  5..7
"""

from __future__ import annotations

import torch

__all__ = ["extent_of", "share_of"]


def extent_of(size: int, member: int, num_parts: int) -> tuple[int, int]:
    """Returns where a member's part of a dimension of `size` begins, and how long it is.

    >>> [extent_of(7, member, 3) for member in range(3)]
    [(0, 3), (3, 2), (5, 2)]
    """
    equal, rest = divmod(size, num_parts)
    return member * equal + min(member, rest), equal + (member < rest)


def share_of(tensor: torch.Tensor, dim: int, sections: int, member: int, num_parts: int) -> torch.Tensor:
    """Returns a member's share of each of several equal sections of `tensor` along `dim`, behind each other.

    Raises:
        ValueError: The sections are several, and the members cannot have equal shares of each.
    """
    if sections == 1:
        return tensor.narrow(dim, *extent_of(tensor.shape[dim], member, num_parts))
    size, rest = divmod(tensor.shape[dim], sections * num_parts)
    if rest:
        raise ValueError(f"{sections} sections of {tensor.shape[dim]} cannot be divided by {num_parts}")
    return tensor.unflatten(dim, (sections, num_parts, size)).select(dim + 1, member).flatten(dim, dim + 1)
