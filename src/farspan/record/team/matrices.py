"""Splits products with the model's matrices over the members of a stage.

    column   every member has x        x @ W[:, part]              each has its columns of the result
    row      each has a part of x      x[.., part] @ W[part, :]    the sum of what they give is the result

Which of the two follows from what a member has of x. Sums are made in the order of members, on each of them alike. A
parameter has one owner; a slice of it comes to the member that uses it when it has changed, and its gradient goes home.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.infer.entry import intern
from farspan.call.leaf import sliced
from farspan.graph import Meta, SliceName, Value
from farspan.record.team.products import Product, product_of
from farspan.record.team.team_tensor import Splits, SplitStage, TeamTensor, used
from farspan.record.tensor import LazyTensor

if TYPE_CHECKING:
    from farspan.call.leaf import Placed
    from farspan.record.recording import Recording

__all__ = ["Matrices"]


class Matrices:
    """How the matrices of split stages are split.

    Args:
        recorder: Records what members do.
        splitting: Knows the split stages.
        record: Records a function on a stage.
        everywhere: Gives what each member has of a tensor.
    """

    def __init__(
        self,
        recorder: Recording,
        splitting: Splits,
        record: Callable[[Any, tuple[Any, ...], int], Any],
        everywhere: Callable[[Any, SplitStage], TeamTensor],
    ) -> None:
        self.recorder = recorder
        self.splitting = splitting
        self.record = record
        self.everywhere = everywhere
        self.kept_whole: dict[str, str] = {}
        """Why a matrix is not split, by its name."""
        self.split: dict[str, str] = {}
        """In which form a matrix was split last ("column", "row"), by its name."""
        self.sliced: set[str] = set()
        """Names of the parameters that have been used in slices."""
        self._sections: dict[str, int] = {}
        """Into how many sections the columns of a matrix fall, by its name, if not into one."""
        self._columns: dict[str, int] = {}
        """How many columns a matrix has that has been split by them, by its name."""
        self._is_provisional = False
        """True if a matrix of the current graph will be split otherwise in the next one."""
        self._slices: dict[SliceName, Value] = {}

    def forget_slices(self) -> None:
        """A step has ended, or parameters were written: from now on they are new sources."""
        self._slices.clear()

    def form_of(self, name: str) -> tuple[str, str]:
        """Returns how a parameter is split ("column", "row", "whole"; "" if it is in no product), and why not."""
        if name in self.kept_whole:
            return "whole", self.kept_whole[name]
        return self.split.get(name, ""), ""

    def let_fall(self, name: str, sections: int, num_parts: int) -> bool:
        """Let the columns of a matrix fall into sections from now on; returns whether they can, and did not before."""
        placed = self._columns.get(name)
        if sections < 2 or name in self._sections or placed is None or placed % (sections * num_parts):
            return False
        self._sections[name] = sections
        self._is_provisional = True
        return True

    def keep_whole(self, name: str, reason: str) -> None:
        """Let a matrix be whole from now on; not for what follows from one that will be split otherwise."""
        if not self._is_provisional:
            self.kept_whole.setdefault(name, reason)

    def end_graph(self) -> None:
        """The micro-batch that has been recorded ends."""
        self._is_provisional = False

    def product(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], current: SplitStage | None) -> Any:
        """Record a product with one of the model's matrices; NotImplemented if it is none that can be split.

        Args:
            function: Whichever.
            args: As the program gives them.
            kwargs: By name.
            current: The stage of the module that is running.
        """
        product = product_of(function, args, kwargs)
        if product is None:
            return NotImplemented
        kind, x, weight, bias = product
        recorder, placed = self.recorder, self.recorder.placed.get(id(weight))
        split = x._split if type(x) is TeamTensor else current
        if placed is None or split is None or not placed.is_parameter or weight.dim() != 2 or not x.dim():
            return NotImplemented
        is_plain = type(x) is torch.Tensor
        if not (is_plain or isinstance(x, LazyTensor)) or not x.dtype.is_floating_point:
            return NotImplemented
        if is_plain and x.requires_grad:
            return NotImplemented
        bias_placed = None if bias is None else recorder.placed.get(id(bias))
        if bias is not None and (bias_placed is None or bias.dim() != 1):
            return NotImplemented
        name, num_parts, num_columns = placed.name, len(split.members), weight.shape[kind.out_dim]
        if any(item.name in recorder.hooks.hooked for item in (placed, bias_placed) if item is not None):
            self.kept_whole.setdefault(name, "it has a hook")
        near: Any = x
        if type(x) is TeamTensor and x._dim is not None:
            is_last = x._dim == x.dim() - 1 and x._sections == 1
            if is_last and weight.shape[kind.in_dim] == x.shape[-1] and name not in self.kept_whole:
                self.split[name] = "row"
                return self._row(function, kind, x, placed, bias)
            near = self.splitting.join(x, f"{name} takes it as a whole")
        elif num_columns % num_parts or num_columns < 2 * num_parts:
            self.keep_whole(name, f"{num_columns} columns for {num_parts} ranks")
        elif name not in self.kept_whole:
            self.split[name] = "column"
            parts = [x] * num_parts if is_plain else used(self.everywhere(x, split))._parts
            return self._column(function, kind, parts, split, placed, bias_placed)
        if type(near) is TeamTensor:  # the copy of the member that owns the matrix, if one of them does
            owners = split.owners
            near = used(near)._parts[owners.index(placed.stage) if placed.stage in owners else 0]
        made, given = kind.call(function, near, weight, bias)
        return recorder.dispatch(made, given, {})

    def slice_of(self, placed: Placed, dim: int, member: int, num_parts: int) -> LazyTensor:
        """Returns a member's slice of a parameter."""
        size, requires_grad = placed.meta.shape[dim] // num_parts, placed.tensor.requires_grad
        name = SliceName(placed.name, dim, member * size, (member + 1) * size)
        self.sliced.add(placed.name)
        self.recorder.before_read(placed.tensor)
        value = self._slices.get(name)
        if value is None or value.meta.requires_grad != requires_grad:
            meta = placed.meta
            shape = (*meta.shape[:dim], size, *meta.shape[dim + 1 :])
            meta = Meta(shape, meta.stride, meta.dtype, meta.device, requires_grad, is_parameter=requires_grad)
            value = self._slices[name] = Value(intern(meta), placed.stage, name=name)
            if placed.is_owned:
                value.data = sliced(placed.tensor.detach(), name)
        return LazyTensor.make(value, self.recorder)

    def _column(
        self,
        function: Any,
        kind: Product,
        given: Sequence[torch.Tensor],
        split: SplitStage,
        weight: Placed,
        bias: Placed | None,
    ) -> TeamTensor:
        parts: list[Any] = []
        num_parts, sections = len(split.members), self._sections.get(weight.name, 1)
        self._columns[weight.name] = weight.meta.shape[kind.out_dim]
        for member, (part, stage) in enumerate(zip(given, split.members, strict=True)):
            own = self._share_of(weight, kind.out_dim, member, num_parts, sections, stage)
            own_bias = None if bias is None else self._share_of(bias, 0, member, num_parts, sections, stage)
            parts.append(self.record(*kind.call(function, part, own, own_bias), stage))
        weights = frozenset([weight.name])
        return TeamTensor.of(self.splitting, split, parts, parts[0].dim() - 1, weights, sections=sections)

    def _share_of(self, placed: Placed, dim: int, member: int, num_parts: int, sections: int, stage: int) -> LazyTensor:
        """Returns a member's share of each section of a parameter, behind each other."""
        if sections == 1:
            return self.slice_of(placed, dim, member, num_parts)
        slices = [
            self.slice_of(placed, dim, number * num_parts + member, sections * num_parts) for number in range(sections)
        ]
        return self.record(torch.cat, (slices, dim), stage)

    def _row(self, function: Any, kind: Product, x: TeamTensor, weight: Placed, bias: Any) -> TeamTensor:
        members = x._split.members
        terms: list[Any] = []
        sums: list[Any] = []
        for member, (part, stage) in enumerate(zip(used(x)._parts, members, strict=True)):
            own = self.slice_of(weight, kind.in_dim, member, len(members))
            terms.append(self.record(*kind.call(function, part, own, None), stage))
        for stage in members:
            total = terms[0]
            for term in terms[1:]:
                total = self.record(torch.add, (total, term), stage)
            sums.append(total if bias is None else self.record(torch.add, (total, bias), stage))
        return TeamTensor.of(self.splitting, x._split, sums, None)
