"""Parameters that calls outside their own module use: sources of the current step."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from farspan.call.infer.entry import intern
from farspan.graph import Meta, Value
from farspan.record.tensor import LazyTensor
from farspan.torch_private import DisableTorchFunction

if TYPE_CHECKING:
    from farspan.call.leaf import Placed

__all__ = ["ParameterValues", "alias_of", "renew_aliases", "renew_aliases_of"]


def alias_of(placed: Placed, *, is_counted: bool = False) -> Value:
    """Returns the parameter's memory without its gradient: what `param.data` is.

    Args:
        placed: The parameter.
        is_counted: Autograd is to see writes into it as writes into the parameter: what `param.detach()` is.
    """
    meta = placed.meta
    value = Value(intern(Meta(meta.shape, meta.stride, meta.dtype, meta.device, False)), placed.stage, name=placed.name)
    if placed.is_owned:
        value.data = placed.tensor.detach() if is_counted else placed.tensor.data
    return value


def renew_aliases(tensors: Sequence[torch.Tensor]) -> None:
    """Let what is a parameter's memory, into which a call has written, be the memory, not the call's result."""
    for item in tensors:
        if type(item) is LazyTensor and item._alias_of is not None:
            item._value = alias_of(item._alias_of, is_counted=item._is_counted)


def renew_aliases_of(placed: Placed) -> None:
    """Let all that is a parameter's memory be what that is now."""
    for item in [item for reference in placed.aliases if (item := reference()) is not None]:
        if item._alias_of is placed:
            item._value = alias_of(placed, is_counted=item._is_counted)
            item._value.lazy = weakref.ref(item)


class ParameterValues:
    """The values that stand for parameters, until these may have changed."""

    def __init__(self) -> None:
        self._values: dict[int, Value] = {}
        self.set_at: dict[str, int] = {}
        """By name of a parameter of which the program has written or set the data, unseen by autograd, the number of
        the first micro-batch since."""

    def of(self, placed: Placed, *, is_fixed: bool = False) -> Value:
        """Returns the parameter as a source of the current step; `is_fixed`: as it is now, whatever is written into
        it."""
        value = None if is_fixed else self._values.get(id(placed))
        if value is None or value.meta.requires_grad != placed.tensor.requires_grad:
            meta = placed.meta
            requires_grad = placed.tensor.requires_grad
            meta = Meta(meta.shape, meta.stride, meta.dtype, meta.device, requires_grad, is_parameter=requires_grad)
            value = Value(intern(meta), placed.stage, name=placed.name)
            if placed.is_owned:
                with DisableTorchFunction():
                    value.data = placed.tensor.detach().clone() if is_fixed else placed.tensor
            if not is_fixed:
                self._values[id(placed)] = value
        return value

    def renew(self, items: Mapping[str, Placed]) -> None:
        """Parameters have come to this rank, which were another one's."""
        for value in self._values.values():
            if value.name in items:
                value.data = items[value.name].tensor

    def forget(self) -> None:
        """A step has ended, or parameters were written: from now on they are new sources."""
        self._values.clear()
