"""Gradients on their way out of a segment, caught at its leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

__all__ = ["caught_at"]


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
