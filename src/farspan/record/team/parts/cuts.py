"""Ways to cut the operands of an operation, of which those are taken that give parts of what the whole gives."""

from __future__ import annotations

from collections.abc import Sequence

from farspan.record.team.parts.apart import Operand

__all__ = ["candidates"]


def candidates(operands: Sequence[Operand]) -> list[tuple[int | None, ...]]:
    """Returns ways to cut the operands, the best first, once each.

    What lies beside the split dimension of another operand is cut along it, or is not; and where several operands are
    split, those that are split otherwise may have to be gathered.
    """
    found: dict[tuple[int | None, ...], None] = {}
    own = tuple([operand.dim for operand in operands])
    split = [operand for operand in operands if operand.dim is not None]
    for is_gathering in (False, True) if len(split) > 1 else (False,):
        for anchor in split:
            beside = [_beside(operand, anchor) for operand in operands]
            kept = [dim if not is_gathering or dim == near else None for dim, near in zip(own, beside, strict=True)]
            kept = [anchor.dim if operand is anchor else dim for operand, dim in zip(operands, kept, strict=True)]
            cut = [near if dim is None else dim for dim, near in zip(kept, beside, strict=True)]
            found.update(dict.fromkeys([tuple(cut), tuple(kept)]))
    return list(found)


def _beside(operand: Operand, anchor: Operand) -> int | None:
    """Returns the dimension of an operand that lies beside the one along which `anchor` is split, if it is as long.

    What modules pass on from one to the next lies there with its last dimension: it is not cut, for then all that comes
    after would be.
    """
    assert anchor.dim is not None
    behind = len(anchor.whole.shape) - anchor.dim
    dim = len(operand.whole.shape) - behind
    if operand.is_fixed and len(operand.whole.shape) == 1:  # a number for each channel
        dim = 0
    if dim < 0 or operand.whole.shape[dim] != anchor.whole.shape[anchor.dim]:
        return None
    return dim if behind > 1 or operand.is_fixed or operand.dim == dim else None
