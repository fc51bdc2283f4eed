"""Recorded tensors that the program makes leaves of autograd: `x.requires_grad_()`, `nn.Parameter(x)`.

Every rank fetches the value and has a plain tensor from then on, which gets its gradient like any outside the model.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from farspan.errors import RecordError
from farspan.graph import Value
from farspan.record.memory.exchanged import become_plain
from farspan.record.memory.twins import leave_memory
from farspan.record.tensor import LazyTensor
from farspan.torch_private import DisableTorchFunction, raw_grad, without_modes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farspan.call.leaf import Placed
    from farspan.record.recording import Recording

__all__ = ["become_leaf", "check_made_of_parameters", "new_parameter"]

_original_new: Any = nn.Parameter.__new__


def become_leaf(lazy: LazyTensor, *, requires_grad: bool) -> None:
    """Let the program hold a plain tensor, which every rank has, where it held `lazy`."""
    recorder, placed = lazy._recorder, lazy._alias_of
    with DisableTorchFunction():
        plain = lazy.read().detach().clone()
    leave_memory(lazy)
    lazy._value = Value(lazy._value.meta, lazy._value.stage)
    become_plain(recorder, lazy, plain)
    with DisableTorchFunction():
        lazy.requires_grad_(requires_grad)
        if placed is not None:
            recorder.copies.add(lazy, placed)


def new_parameter(recorder: Recording, cls: Any, data: torch.Tensor, requires_grad: bool) -> Any:
    """`nn.Parameter(data)` of what is recorded, or of a parameter that is placed."""
    placed = recorder.placed.get(id(data))
    if placed is not None:  # a parameter of its own from now on
        recorder.flush_before_change("a parameter is made of another")
        with without_modes_of(recorder):
            data = recorder.engine.read_parameter(placed).detach().clone()
        with DisableTorchFunction():
            new = _original_new(cls, data, requires_grad)
        recorder.made_of_parameters.append((weakref.ref(new), placed))
        return new
    if type(data) is LazyTensor:
        become_leaf(data, requires_grad=False)
    with DisableTorchFunction():
        return _original_new(cls, data, requires_grad)


def check_made_of_parameters(recorder: Recording, stepped: Sequence[Placed]) -> None:
    """Raise if a step is about to change a parameter of which the program has made another, and trains both.

    Raises:
        RecordError: In torch both would be one memory, which each of the two updates.
    """
    recorder.made_of_parameters = [(new, old) for new, old in recorder.made_of_parameters if new() is not None]
    for new, old in recorder.made_of_parameters:
        known = recorder.placed.get(id(new()))
        has_gradient = raw_grad(new()) is not None if known is None else recorder.engine.has_gradient(known)
        if has_gradient and old in stepped and recorder.engine.has_gradient(old):
            raise RecordError(
                f"{old.name} and the nn.Parameter that was made of it are both trained.",
                why="in one process they are one memory; here the second one has memory of its own.",
                hint="one parameter for both: b.weight = a.weight; or two: nn.Parameter(a.weight.detach().clone())",
            )
