"""Splits products with the model's matrices over the members of a stage.

    column   every member has x        x @ W[:, part]              each has its columns of the result
    row      each has a part of x      x[.., part] @ W[part, :]    the sum of what they give is the result

Which of the two follows from what a member has of x. Sums are made in the order of members, on each of them alike. A
parameter has one owner; a slice of it comes to the member that uses it when it has changed, and its gradient goes home.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.infer.entry import intern
from farspan.call.leaf import sliced
from farspan.graph import Meta, SliceName, Value
from farspan.record.team.parameter_views import ParameterView, ParameterViews
from farspan.record.team.parts.positions import added_up_apart, dim_of_positions
from farspan.record.team.parts.shares import extent_of
from farspan.record.team.products import Product, product_of
from farspan.record.team.slices.layout import Layout
from farspan.record.team.slices.owned import OwnedSlices
from farspan.record.team.team_tensor import Splits, SplitStage, TeamTensor, used
from farspan.record.tensor import LazyTensor
from farspan.torch_private import DisableTorchFunction

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
        self.asked: dict[str, str] = {}
        """How a matrix was asked to lie on the members, by its name."""
        self.kept_whole: dict[str, str] = {}
        """Why a matrix is not split, by its name."""
        self.split: dict[str, str] = {}
        """In which form a matrix was split last ("column", "row", "sequence", "vocab"), by its name."""
        self.by_positions: set[str] = set()
        """Names of the matrices whose sums were asked to be divided along positions ("sequence")."""
        self.gathered_for: set[str] = set()
        """Names of operations that need all positions of what is divided along them."""
        self.sliced: set[str] = set()
        """Names of the parameters that have been used in slices."""
        self.views = ParameterViews()
        self._vocabularies: set[str] = set()
        """Names of the matrices that give at least as many numbers as they take, as one from states to words does."""
        self._sections: dict[str, int] = {}
        """Into how many sections the columns of a matrix fall, by its name, if not into one."""
        self._columns: dict[str, int] = {}
        """How many columns a matrix has that has been split by them, by its name."""
        self._with_channels: set[str] = set()
        """Names of those of them whose columns are channels: they are not the result's last dimension."""
        self._names: dict[str, str] = {}
        """The parameter of which a matrix is some rows, by the name of these."""
        self._is_provisional = False
        """True if a matrix of the current graph will be split otherwise in the next one."""
        self._slices: dict[SliceName, Value] = {}
        self.owned = OwnedSlices()
        """The slices that members own themselves."""

    def ask(self, layouts: Mapping[str, str]) -> None:
        """Let matrices lie as asked, by name."""
        self.by_positions |= {name for name, layout in layouts.items() if layout == "sequence"}
        self.asked.update({name: layout for name, layout in layouts.items() if layout != "sequence"})
        self.kept_whole.update({name: "as asked" for name, layout in layouts.items() if layout == "whole"})

    def forget_slices(self) -> None:
        """A step has ended, or parameters were written: from now on they are new sources."""
        self._slices.clear()
        self.owned.forget_values()

    def form_of(self, name: str) -> tuple[str, str]:
        """Returns how a parameter is split ("column", "row", "sequence", "vocab", "whole"; "" if it is in no product),
        and why not."""
        if name in self.kept_whole:
            return "whole", self.kept_whole[name]
        rows = [each for each, whole_name in self._names.items() if whole_name == name]
        if rows and all(each in self.kept_whole for each in rows):
            return "whole", self.kept_whole[rows[0]]
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
        """Let a matrix be whole from now on; not for what follows from one that will be split otherwise, nor if it was
        asked to be split: then what it gives is gathered each time."""
        if not self._is_provisional and self._names.get(name, name) not in self.asked:
            self.kept_whole.setdefault(name, reason)

    def note_hooks(self, name: str, items: Sequence[ParameterView]) -> None:
        """Let a matrix that is used with these parameters be whole if one of them has a hook."""
        if any(item.placed.name in self.recorder.hooks.hooked for item in items):
            self.kept_whole.setdefault(name, "it has a hook")

    def note_columns(self, name: str, num_columns: int, *, has_channels: bool = False) -> int:
        """A matrix is split by columns; returns into how many sections they fall."""
        self._columns[name] = num_columns
        if has_channels:
            self._with_channels.add(name)
        whole_name = self._names.get(name, name)
        if self.split.get(whole_name) != "vocab":
            self.split[whole_name] = "column"
        return self._sections.get(name, 1)

    def have_channels(self, names: Collection[str]) -> bool:
        """Returns whether what matrices of these names give has channels along a dimension that is not the last."""
        return bool(names) and self._with_channels.issuperset(names)

    def are_vocabularies(self, names: Collection[str]) -> bool:
        """Returns whether a tensor that matrices of these names have split may have a number for each word."""
        return bool(names) and self._vocabularies.issuperset(names)

    def note_vocabulary(self, names: Collection[str]) -> None:
        """A loss has taken what matrices of these names give, word by word."""
        whole_names = [self._names.get(name, name) for name in names]
        self.split.update(dict.fromkeys([name for name in whole_names if self.asked.get(name) != "column"], "vocab"))

    def end_graph(self) -> None:
        """The micro-batch that has been recorded ends."""
        self._is_provisional = False
        self.views.clear()

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
        split = x._split if type(x) is TeamTensor else current
        if split is None or not x.dim() or weight.dim() != 2:
            return NotImplemented
        matrix = self.view_of(weight)
        is_plain = type(x) is torch.Tensor
        if matrix is None or not (is_plain or isinstance(x, LazyTensor)) or not x.dtype.is_floating_point:
            return NotImplemented
        if is_plain and x.requires_grad:
            return NotImplemented
        offset = None if bias is None else self.view_of(bias)
        if bias is not None and (offset is None or bias.dim() != 1):
            return NotImplemented
        name, num_parts, num_columns = self._known(matrix), len(split.members), weight.shape[kind.out_dim]
        self.note_hooks(name, [matrix] if offset is None else [matrix, offset])
        asked, is_whole = self.asked.get(matrix.placed.name), self._reason(name) is not None
        call = _Call(function, kind, matrix, offset, split)
        near: Any = x
        if type(x) is TeamTensor and x._dim is not None and not x.is_by_positions:
            is_last = x._dim == x.dim() - 1 and x._sections == 1
            fits = is_last and weight.shape[kind.in_dim] == x.shape[-1]
            if fits and not is_whole and asked in (None, "row"):
                return self._row(call, x, bias)
            near = self.splitting.join(x, f"{name} takes it as a whole")
        is_few = num_columns < 2 * num_parts or (num_columns % num_parts and num_columns < weight.shape[kind.in_dim])
        if near is x and is_few and not is_whole and asked is None:
            self.cannot(name, f"{num_columns} columns for {num_parts} ranks")
        elif not is_whole and (asked or near is x) and num_columns >= num_parts:
            parts = [near] * num_parts if is_plain else used(self.everywhere(near, split))._parts
            return self._row_of_whole(call, parts, bias) if asked == "row" else self._column(call, parts)
        if type(near) is TeamTensor and near._dim is not None:
            near = used(near).join()
        elif type(near) is TeamTensor:  # the copy of the member that owns the matrix, if one of them does
            owners, stage = split.owners, matrix.placed.stage
            near = used(near)._parts[owners.index(stage) if stage in owners else 0]
        made, given = kind.call(function, near, weight, bias)
        return self.splitting.dispatch_whole(made, given, {})

    def view(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a view of a parameter, of which members may take slices; NotImplemented if it is none."""
        source = self.view_of(args[0]) if args else None
        if source is None:
            return NotImplemented
        result = self.recorder.dispatch(function, args, kwargs)
        self.views.note(source, function, result)
        return result

    def slice_of(self, placed: Placed, dim: int, begin: int, size: int) -> LazyTensor:
        """Returns a slice of a parameter, for a member."""
        requires_grad = placed.tensor.requires_grad
        name = SliceName(placed.name, dim, begin, begin + size)
        self.sliced.add(placed.name)
        self.recorder.before_read(placed.tensor)
        value = self._slices.get(name)
        if value is None or value.meta.requires_grad != requires_grad:
            meta = placed.meta
            shape = (*meta.shape[:dim], size, *meta.shape[dim + 1 :])
            meta = Meta(shape, meta.stride, meta.dtype, meta.device, requires_grad, is_parameter=requires_grad)
            value = self._slices[name] = Value(intern(meta), placed.stage, name=name)
            if placed.is_owned:
                with DisableTorchFunction():
                    value.data = sliced(placed.tensor.detach(), name)
        return LazyTensor.make(value, self.recorder)

    def share_of(self, view: ParameterView, dim: int, member: int, split: SplitStage, sections: int = 1) -> LazyTensor:
        """Returns a member's share of each section of a parameter along `dim`, behind each other."""
        placed, num_parts, whole = view.placed, len(split.members), view.extent(dim)
        layout = Layout(split, dim, sections) if view.is_all and whole % (sections * num_parts) == 0 else None
        self.owned.note(placed, layout)
        if placed.name in self.owned.slices:
            if layout is None:
                self.owned.need_whole(placed, "is used otherwise")
            elif (owned := self.owned.own(placed, layout, member, self.recorder)) is not None:
                return owned
        first = view.begin if dim == 0 else 0
        if sections == 1:
            begin, size = extent_of(whole, member, num_parts)
            own = self.slice_of(placed, dim, first + begin, size)
            if dim == 0 or view.is_all:
                return own
            return self.record(torch.narrow, (own, 0, view.begin, view.size), split.members[member])
        size = whole // (sections * num_parts)
        begins = [first + (number * num_parts + member) * size for number in range(sections)]
        slices = [self.slice_of(placed, dim, begin, size) for begin in begins]
        return self.record(torch.cat, (slices, dim), split.members[member])

    def view_of(self, tensor: Any) -> ParameterView | None:
        """Returns what a tensor is, if that is a parameter or a view of one."""
        return self.views.of(tensor, self.recorder.placed.get(id(tensor)))

    def _known(self, matrix: ParameterView) -> str:
        """Returns the name by which a matrix is known: its parameter's, or one for these rows of it."""
        name = matrix.key
        if not matrix.is_all:
            self._names[name] = matrix.placed.name
        return name

    def _reason(self, name: str) -> str | None:
        """Returns why a matrix is whole; None if it is not."""
        return self.kept_whole.get(name, self.kept_whole.get(self._names.get(name, name)))

    def cannot(self, name: str, reason: str) -> None:
        """A matrix cannot be split, asked or not."""
        if not self._is_provisional:
            self.kept_whole.setdefault(name, reason)

    def _column(self, call: _Call, given: Sequence[torch.Tensor]) -> TeamTensor:
        parts: list[Any] = []
        matrix, split, dim = call.matrix, call.split, call.out_dim
        name, num_columns, whole_name = matrix.key, matrix.extent(dim), matrix.placed.name
        sections = self.note_columns(name, num_columns)
        if num_columns >= matrix.extent(1 - dim) or self.asked.get(whole_name) == "vocab":
            self._vocabularies.add(name)
        for member, (part, stage) in enumerate(zip(given, split.members, strict=True)):
            own = self._laid(self.share_of(matrix, dim, member, split, sections), call, stage)
            own_bias = None if call.bias is None else self.share_of(call.bias, 0, member, split, sections)
            parts.append(self.record(*call.kind.call(call.function, part, own, own_bias), stage))
        last = parts[0].dim() - 1
        return TeamTensor.of(self.splitting, split, parts, last, frozenset([name]), sections=sections)

    def _row_of_whole(self, call: _Call, given: Sequence[torch.Tensor], bias: Any) -> Any:
        """A product by rows, as asked, of what each member has as a whole."""
        split, last = call.split, given[0].dim() - 1
        parts = [
            self.record(torch.narrow, (part, last, *extent_of(part.shape[-1], member, len(given))), stage)
            for member, (part, stage) in enumerate(zip(given, split.members, strict=True))
        ]
        return self._row(call, TeamTensor.of(self.splitting, split, parts, last), bias)

    def _row(self, call: _Call, x: TeamTensor, bias: Any) -> TeamTensor:
        terms: list[Any] = []
        for member, (part, stage) in enumerate(zip(used(x)._parts, call.split.members, strict=True)):
            own = self._laid(self.share_of(call.matrix, call.in_dim, member, call.split), call, stage)
            terms.append(self.record(*call.kind.call(call.function, part, own, None), stage))
        name = call.matrix.placed.name
        dim = dim_of_positions(terms[0].shape, len(terms)) if name in self.by_positions else None
        self.split[name] = "row" if dim is None else "sequence"
        if dim is None:
            return self.added_up(terms, call.split, bias)
        return added_up_apart(self.splitting, terms, call.split, bias, dim)

    def _laid(self, own: Any, call: _Call, stage: int) -> Any:
        """Returns a slice as the function takes it."""
        return self.record(torch.t, (own,), stage) if call.matrix.is_transposed else own

    def added_up(
        self,
        terms: Sequence[Any],
        split: SplitStage,
        bias: Any = None,
        weights: frozenset[str] = frozenset(),
        num_behind: int = 0,
    ) -> TeamTensor:
        """Returns the sum of what the members have, in their order, on each of them alike; and a bias along the
        dimension behind which there are `num_behind`. It is kept for the backward: what is computed again begins there,
        and exchanges nothing."""
        sums: list[Any] = []
        with self.splitting.kept():
            for stage in split.members:
                total = terms[0]
                for term in terms[1:]:
                    total = self.record(torch.add, (total, term), stage)
                own = bias
                if bias is not None and (num_behind or bias.dtype != total.dtype):
                    own = self.record(_along, (bias, total.dtype, num_behind), stage)
                sums.append(total if bias is None else self.record(torch.add, (total, own), stage))
        return TeamTensor.of(self.splitting, split, sums, None, weights)


def _along(bias: torch.Tensor, dtype: torch.dtype, num_behind: int) -> torch.Tensor:
    """Returns a bias in the precision of a sum (as a product under autocast gives it), with more dimensions behind."""
    return bias.to(dtype).view(-1, *[1] * num_behind)


@dataclass(frozen=True, slots=True)
class _Call:
    """A product with a matrix that is split.

    Attributes:
        function: Which multiplies.
        kind: How it takes its arguments.
        matrix: The parameter, or a view of one.
        bias: The same, if it adds one.
        split: The stage.
    """

    function: Any
    kind: Product
    matrix: ParameterView
    bias: ParameterView | None
    split: SplitStage

    @property
    def out_dim(self) -> int:
        """Returns the dimension of the parameter along which the result's last one lies."""
        return self.kind.out_dim ^ self.matrix.is_transposed

    @property
    def in_dim(self) -> int:
        """Returns the dimension of the parameter along which that of x lies."""
        return self.kind.in_dim ^ self.matrix.is_transposed
