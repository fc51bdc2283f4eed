"""Tensors computed from parameters that modules hold before they are placed, as the old weight_norm's `weight`.

    g, v (parameters)  ->  weight = g * v / |v|   (computed when the norm is put on, and again before each forward)

The graph behind such a tensor holds its parameters, so that no stub could take their places on other ranks.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from farspan.errors import RecordError
from farspan.torch_private import tree_leaves

__all__ = ["cut_from_parameters"]


def cut_from_parameters(model: nn.Module) -> None:
    """Release the graphs behind tensors that `model`'s modules have computed from its parameters.

    The tensors stay, with their values, for the program to read until the next forward computes them again. One that
    is never computed again would train nothing from here on: the backward that reaches it says so.

    Args:
        model: Before it is placed.
    """
    parameters = set(map(id, model.parameters()))
    for name, module in model.named_modules():
        for attribute, item in [*vars(module).items(), *module._buffers.items()]:
            for tensor in tree_leaves(item) if type(item) in (list, tuple, dict) else [item]:
                if isinstance(tensor, torch.Tensor) and _is_computed_from(tensor.grad_fn, parameters):
                    where = f"{name}.{attribute}" if name else attribute
                    _cut(tensor, where)


def _is_computed_from(node: Any, parameters: set[int]) -> bool:
    """Returns whether a graph leads to one of the parameters, given by their ids."""
    nodes, seen = [node], {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in parameters:
            return True
        nodes.extend(following for following, _ in node.next_functions)
    return False


def _cut(tensor: torch.Tensor, where: str) -> None:
    def refuse(_: torch.Tensor) -> NoReturn:
        raise RecordError(
            f"the gradient of {where} cannot reach the parameters it was computed from.",
            why="it was computed before distribute, which gave the parameters their places, and never again since.",
            hint="compute it in forward, or in a forward pre-hook, from the parameters",
        )

    if tensor._is_view():
        return  # the parameter cannot be given away then, and says why
    tensor.detach_().requires_grad_().register_hook(refuse)
