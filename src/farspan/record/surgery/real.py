"""Lets tensors with data take the place of stubs, in a program that runs: a parameter comes to this rank."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import nn

from farspan.call.leaf import Placed
from farspan.record.tensor import StubParameter
from farspan.torch_private import tensor_of_class

__all__ = ["become_real", "without_weak_references"]


@contextlib.contextmanager
def without_weak_references(model: nn.Module) -> Iterator[None]:
    """Recurrent modules hold some to their weights, which would get in the way of the stubs."""
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    try:
        yield
    finally:
        for module in recurrent:
            held = [None if weight is None else weakref.ref(weight) for weight in module._flat_weights]
            module._flat_weight_refs = held


def become_real(item: Placed, data: torch.Tensor) -> None:
    """Lets a tensor with data take the place of a stub.

    Args:
        item: Of which there is a stub here.
        data: Its data, which are its own from here on.

    Raises:
        RuntimeError: Something in this program holds a weak reference to the stub, or to its autograd node.
    """
    tensor = item.tensor
    assert type(tensor) is StubParameter
    real = tensor_of_class(item.kind, data, requires_grad=tensor.requires_grad)
    written = {name: value for name, value in vars(tensor).items() if name not in StubParameter.__annotations__}
    torch.utils.swap_tensors(tensor, real)
    vars(tensor).update(written)
