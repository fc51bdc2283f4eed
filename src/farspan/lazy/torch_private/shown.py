"""How torch shows a tensor that has a history: `tensor(0.5, grad_fn=<MeanBackward0>)`."""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["history_of", "with_history"]


def history_of(tensor: torch.Tensor) -> str:
    """The name that torch shows for what has made `tensor`; "" where it shows none."""
    node: Any = tensor.grad_fn
    if node is None:
        return ""
    name = type(node).__name__
    return node.name().rpartition("::")[2] if name == "CppFunction" else name


def with_history(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """`tensor`, which torch shows as made by something of this name; to be shown only."""
    with torch.inference_mode(False), torch.enable_grad():
        return _function_named(name).apply(tensor.detach().clone().requires_grad_())


@functools.cache
def _function_named(name: str) -> Any:
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    function: Any = type(name, (torch.autograd.Function,), {"forward": staticmethod(forward)})
    function._backward_cls.__name__ = name
    return function
