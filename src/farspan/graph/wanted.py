"""What `torch.autograd.grad` is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farspan.graph.value import Value

__all__ = ["Wanted"]


class Wanted:
    """What `torch.autograd.grad` is asked for: gradients that are returned instead of being added to `.grad`."""

    __slots__ = ("before_hooks", "found", "gradients", "names", "outside", "reached", "values")

    def __init__(self, names: Sequence[str], outside: Sequence[Any], values: Sequence[Value] = ()) -> None:
        self.names = frozenset(names)
        """Parameters."""
        self.outside = tuple(outside)
        """Tensors outside the model."""
        self.values = dict.fromkeys(values)
        """Recorded tensors of which gradients are requested."""
        self.reached: set[str | Value] = set()
        """Those parameters (by name) and recorded values that the outputs depend on."""
        self.found: dict[str | Value, Any] = {}
        """The gradients of those that live on this rank."""
        self.before_hooks: dict[Value, Any] = {}
        """The gradients of recorded values as they were before hooks changed them, recorded ones, where autograd
        returns these: the backward goes on behind the value."""
        self.gradients: Sequence[Any] = [None] * len(self.outside)
        """The gradients of the tensors outside."""
