"""Gives modules what they hold while a backward goes through them: code that is run again there finds what the forward
found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from farspan.call.leaf import Leaf
from farspan.graph import BackwardSegment, Segment, Value

__all__ = ["holding_foreign"]


@contextlib.contextmanager
def holding_foreign(part: BackwardSegment) -> Iterator[None]:
    """Let the modules that `part` goes back through hold the parameters of other stages that they were called with:
    activations may be computed again (`torch.utils.checkpoint`).
    """
    with contextlib.ExitStack() as stack:
        leaves: dict[Any, Any] = {}
        for call in part.calls:
            if type(call.target) is Leaf and call.target.foreign:
                leaves[call.target] = call
        for leaf, call in leaves.items():
            tensors = [_tensor_of(item, part.segment) for item in call.arguments[-leaf.num_extra :]]
            if all(item is not None for item in tensors):
                stack.enter_context(leaf.holding(tensors))
        yield


def _tensor_of(item: Any, segment: Segment | None) -> Any:
    """Returns the tensor that a call was given; None if it is no longer there."""
    if type(item) is not Value or segment is None:
        return item
    leaf = segment.leaves.get(item)
    return item.data if leaf is None else leaf
