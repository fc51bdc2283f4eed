"""Views of a parameter of which members take slices all the same: its transpose, and some of its rows.

x @ W.T                          W, its rows and columns exchanged
q, k, v = in_proj.chunk(3)       in_proj, rows 0 to d, d to 2 d, 2 d to 3 d
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from farspan.graph import Value
from farspan.record.tensor import LazyTensor

if TYPE_CHECKING:
    from farspan.call.leaf import Placed

__all__ = ["CHANGES_VIEW", "ParameterView", "ParameterViews"]

_T: Any = torch.Tensor
_TRANSPOSES = frozenset(
    [_T.T.__get__, _T.mT.__get__, torch.t, _T.t, torch.transpose, _T.transpose, torch.permute, _T.permute]
)
_DIVISIONS = frozenset([torch.chunk, _T.chunk, torch.split, _T.split])
CHANGES_VIEW = _TRANSPOSES | _DIVISIONS
"""The functions that give such views."""


@dataclass(frozen=True, slots=True)
class ParameterView:
    """A parameter, or a view of one.

    Attributes:
        placed: The parameter.
        begin: Its first row in the view.
        size: How many rows the view has of it.
        is_transposed: Whether rows and columns are exchanged.
    """

    placed: Placed
    begin: int
    size: int
    is_transposed: bool = False

    @property
    def key(self) -> str:
        """Returns the parameter's name; with the rows, if they are not all."""
        return self.placed.name if self.is_all else f"{self.placed.name}[{self.begin}:{self.begin + self.size}]"

    @property
    def is_all(self) -> bool:
        """Returns whether the view has all rows."""
        return self.size == self.placed.meta.shape[0]

    def extent(self, dim: int) -> int:
        """Returns how much the view has of a dimension of the parameter."""
        return self.size if dim == 0 else self.placed.meta.shape[dim]


class ParameterViews:
    """The views of parameters that the model has made in the current micro-batch."""

    def __init__(self) -> None:
        self._known: dict[Value, ParameterView] = {}

    def clear(self) -> None:
        """Forget all of them."""
        self._known.clear()

    def of(self, tensor: Any, placed: Placed | None) -> ParameterView | None:
        """Returns what a tensor is, if that is a parameter or a view of one."""
        if placed is not None:
            return ParameterView(placed, 0, placed.meta.shape[0]) if placed.is_parameter and placed.meta.shape else None
        return self._known.get(tensor._value) if type(tensor) is LazyTensor else None

    def note(self, source: ParameterView, function: Any, result: Any) -> None:
        """A function of `CHANGES_VIEW` has given `result` of `source`.

        Args:
            source: What it was given.
            function: Which.
            result: What it has given, as recorded.
        """
        shape, placed = source.placed.meta.shape, source.placed
        if function in _TRANSPOSES:
            if type(result) is not LazyTensor or len(shape) != 2:
                return
            own, stride = (source.size, *shape[1:]), placed.meta.stride
            if source.is_transposed:
                own, stride = own[::-1], stride[::-1]
            found = result._value.meta
            is_told_apart = own[0] != own[1] or stride[0] != stride[1]
            if found.shape != own[::-1] or found.stride != stride[::-1] or not is_told_apart:
                return
            flipped = not source.is_transposed
            self._known[result._value] = ParameterView(placed, source.begin, source.size, flipped)
            return
        begin = source.begin
        if source.is_transposed or not isinstance(result, (tuple, list)):
            return
        if any(type(part) is not LazyTensor or tuple(part.shape[1:]) != tuple(shape[1:]) for part in result):
            return
        if sum(part.shape[0] for part in result) != source.size:
            return
        for part in result:
            self._known[part._value] = ParameterView(placed, begin, part.shape[0])
            begin += part.shape[0]
