"""What is around autograd while it goes back through a segment: it finds what the forward found, and what comes out at
the segment's border is caught.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from farspan.call.leaf import Leaf, Placed
from farspan.graph import BackwardSegment, Segment, Value, whole_name

__all__ = ["caught_at", "holding_foreign", "passed_on"]


@contextlib.contextmanager
def caught_at(leaves: Sequence[torch.Tensor]) -> Iterator[dict[int, torch.Tensor]]:
    """Catch what arrives at `leaves`, by id, before autograd puts it into `.grad` in the leaf's own strides: in one
    process it would go on as it is.
    """
    caught: dict[int, torch.Tensor] = {}

    def catch(leaf_id: int) -> Callable[[Any], tuple[None]]:
        def hook(gradients: Any) -> tuple[None]:
            before = caught.get(leaf_id)  # of a backward inside this one
            caught[leaf_id] = gradients[0] if before is None else before + gradients[0]
            return (None,)

        return hook

    nodes = [get_gradient_edge(leaf).node for leaf in leaves]  # which autograd itself holds by weak references
    handles = [node.register_prehook(catch(id(leaf))) for node, leaf in zip(nodes, leaves, strict=True)]
    try:
        yield caught
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def passed_on(part: BackwardSegment, parameters: Mapping[str, Placed]) -> Iterator[None]:
    """Mark the parameters of which `part` has a share of the gradient only."""
    shared = [parameters[whole_name(edge.key)] for edge in part.outgoing if isinstance(edge.key, str)]
    for placed in shared:
        placed.is_passed_on = True
    try:
        yield
    finally:
        for placed in shared:
            placed.is_passed_on = False


@contextlib.contextmanager
def holding_foreign(part: BackwardSegment) -> Iterator[None]:
    """Let the modules that `part` goes back through hold the parameters of other stages that they were called with:
    their code may be run again (`torch.utils.checkpoint`).
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
    """The tensor that a call was given; None if it is no longer there."""
    if type(item) is not Value or segment is None:
        return item
    leaf = segment.leaves.get(item)
    return item.data if leaf is None else leaf
