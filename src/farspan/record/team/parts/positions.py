"""Sums that members divide along the positions of a sequence, each of which is normalised, dropped out and added to by
one of them.

    x0   p0 ..  p1 ..     member 0 adds up the first positions      norm(x)[:, :t/2]     all of it for the next matrix
    x1   p0 ..  p1 ..     member 1 adds up the others               norm(x)[:, t/2:]     all of it

What each sends is the share of a member of what it has, instead of all of it to each: and then its part of what the
next matrix takes. In the backward the two change places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farspan.record.team.parts.shares import extent_of
from farspan.record.team.team_tensor import Splits, SplitStage, TeamTensor

__all__ = ["added_up_apart", "dim_of_positions"]


def dim_of_positions(shape: Sequence[int], num_parts: int) -> int | None:
    """Returns along which dimension of a sum each member has some positions: the last one before the features that is
    long enough; None if there is none.

    >>> dim_of_positions((2, 7, 16), 2), dim_of_positions((2, 1, 16), 2), dim_of_positions((1, 1, 16), 2)
    (1, 0, None)
    """
    return next((dim for dim in reversed(range(len(shape) - 1)) if shape[dim] >= num_parts), None)


def added_up_apart(splitting: Splits, terms: Sequence[Any], split: SplitStage, bias: Any, dim: int) -> TeamTensor:
    """Returns the sum of what the members have, in their order: of each position on one of them, and a bias of its last
    dimension.

    Args:
        splitting: Records it.
        terms: What each member has.
        split: The stage.
        bias: A parameter, or None.
        dim: Of the positions.
    """
    num_parts = len(terms)
    shares = [
        splitting.record(_shares, (term, dim, num_parts), stage)
        for term, stage in zip(terms, split.members, strict=True)
    ]
    sums: list[Any] = []
    with splitting.kept():
        for member, stage in enumerate(split.members):
            total = shares[0][member]
            for share in shares[1:]:
                total = splitting.record(torch.add, (total, share[member]), stage)
            if bias is not None:
                own = bias
                if bias.dtype != total.dtype:
                    own = splitting.record(torch.Tensor.to, (bias, total.dtype), stage)
                total = splitting.record(torch.add, (total, own), stage)
            sums.append(total)
    return TeamTensor.of(splitting, split, sums, dim)


def _shares(term: torch.Tensor, dim: int, num_parts: int) -> tuple[torch.Tensor, ...]:
    """Returns each member's positions, in memory of their own."""
    sizes = [extent_of(term.shape[dim], member, num_parts)[1] for member in range(num_parts)]
    return tuple([share.clone(memory_format=torch.contiguous_format) for share in term.split(sizes, dim)])
