"""Describes how the rows of a batch lie in a tensor, and what a rule for an operation is given.

    x [s, 7, 6]                Shard(0)              row b of the batch is x[b]
    x.view(-1, 6) [7 s, 6]     Shard(0)              .. is x[7 b : 7 b + 7]
    x.transpose(0, 1)          Shard(1)
      .reshape(-1, 6) [7 s, 6] Shard(0, outer=7)     .. is x[b :: s]
    x.sum(0) [7, 6]            Partial               the sum of what the parts of a batch give
    weight                     Replicate             the same for every part of a batch
    x - x.mean(0)              Mixed                 rows depend on each other, or no rule says that they do not

`s` is the number of rows, a symbol: that two sizes are equal by chance is not seen, and code that asks for it is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from farspan.torch_private import product, quotient, tree_leaves, units_of

__all__ = ["Layout", "Mixed", "Op", "Partial", "Replicate", "Shard", "joined", "normal", "reshaped"]


@dataclass(frozen=True, slots=True)
class Replicate:
    """The same for every part of a batch; all elements are zero, if that is known."""

    is_zero: bool = False


@dataclass(frozen=True, slots=True)
class Shard:
    """Dimension `dim` is [outer, rows, inner]: each row of the batch has its own elements.

    Attributes:
        dim: Which.
        outer: What stands before the rows in it.
        is_index: Whether the elements are the numbers of the rows, as `torch.arange(len(x))` gives them.
    """

    dim: int
    outer: Any = 1
    is_index: bool = False


@dataclass(frozen=True, slots=True)
class Partial:
    """The whole is the sum of what the parts of the batch give.

    Attributes:
        is_mean: Whether it is a loss whose sum is still to be divided by what the whole batch counts.
    """

    is_mean: bool = False


@dataclass(frozen=True, slots=True)
class Mixed:
    """Rows depend on each other, or may; says by what, and where in the model's code that was found."""

    why: str
    where: str | None = field(default=None, compare=False)


Layout = Replicate | Shard | Partial | Mixed


@dataclass(slots=True)
class Op:
    """An operation that has run on tensors without data.

    Attributes:
        name: Of the aten operation, without its overload and without the underscore of one that writes.
        given: Its arguments by name.
        results: The tensors that it gives.
        of: The layout of a tensor; of anything else that it is the same for all rows.
        rows: The symbol for the number of rows.
        is_in_place: Whether it writes into its first argument.
    """

    name: str
    given: dict[str, Any]
    results: Sequence[torch.Tensor]
    of: Callable[[Any], Layout]
    rows: Any
    is_in_place: bool = False

    def __getitem__(self, name: str) -> Any:
        return self.given[name]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [item for item in tree_leaves([*self.given.values()]) if isinstance(item, torch.Tensor)]

    def units(self, size: Any) -> Any:
        """Returns how many times the number of rows a size is, a number or an expression: 0 where it does not depend on
        it, -1 where it is no multiple.
        """
        return units_of(size, self.rows)

    def follows_rows(self, argument: Any) -> bool:
        """Returns whether the number of rows is in a plain argument, or in a list of them."""
        symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
        return any(isinstance(item, symbols) and self.units(item) != 0 for item in tree_leaves(argument))

    def sharded_dim(self, tensor: torch.Tensor) -> int:
        """Returns the dimension whose size follows the number of rows; -1 where none does, -2 where that is not
        plain."""
        found = [dim for dim, size in enumerate(tensor.shape) if self.units(size)]
        if not found:
            return -1
        return found[0] if len(found) == 1 and self.units(tensor.shape[found[0]]) != -1 else -2

    def inner(self, tensor: torch.Tensor, layout: Shard) -> Any:
        """Returns how many elements each row has along the dimension in which the rows lie."""
        return quotient(self.units(tensor.shape[layout.dim]), layout.outer)

    def mixed(self) -> Mixed:
        return Mixed(self.name)


def normal(dim: Any, ndim: int) -> int:
    """Returns a dimension, counted from the front."""
    return dim % ndim if ndim else 0


def joined(op: Op, tensors: Sequence[Any], ndim: int) -> Layout:
    """Returns the layout of what is computed element by element, with `ndim` dimensions, of tensors that broadcast."""
    found: tuple[int, Any, Any] | None = None
    for tensor in tensors:
        layout = op.of(tensor)
        if isinstance(layout, Replicate):
            continue
        if not isinstance(layout, Shard) or layout.is_index:
            return op.mixed()
        now = (layout.dim + ndim - tensor.dim(), layout.outer, op.units(tensor.shape[layout.dim]))
        if found is not None and found != now:
            return op.mixed()
        found = now
    if found is None:
        return Replicate()
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and isinstance(op.of(tensor), Replicate):
            dim = found[0] - ndim + tensor.dim()
            if dim >= 0 and tensor.shape[dim] != 1:
                return op.mixed()
    return Shard(found[0], found[1])


def reshaped(op: Op, layout: Layout, before: Sequence[Any], after: torch.Tensor) -> Layout:
    """Returns the layout of a tensor with the same elements in the same order, and other sizes.

    Args:
        op: What has reshaped it.
        layout: Before.
        before: Its sizes then.
        after: What it is now.
    """
    if not isinstance(layout, Shard):
        return layout
    dim = op.sharded_dim(after)
    if dim < 0:
        return op.mixed()
    outer = quotient(product([*before[: layout.dim], layout.outer]), product(after.shape[:dim]))
    if outer is None or quotient(op.units(after.shape[dim]), outer) is None:
        return op.mixed()
    return replace(layout, dim=dim, outer=outer)
