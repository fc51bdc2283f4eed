"""Finds the size of what optimizers keep for each parameter, by a step on a small copy of it."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from farspan.call.pytree.template import flatten

__all__ = ["state_bytes"]

_MOST = 8
"""Entries of a small copy in each dimension."""


def state_bytes(parameters: Mapping[int, torch.Tensor]) -> tuple[dict[int, float], list[str]]:
    """Returns bytes of optimizer state of each parameter that an optimizer of this program has, by id.

    A small copy has the parameter's dimensions, but small ones; state as large as the copy is taken to be as large
    as the parameter. What is smaller (step counts, sums of rows) does not count.

    Args:
        parameters: By id.

    Returns:
        The sizes, and notes about optimizers that cannot be tried.
    """
    sizes: dict[int, float] = {}
    notes: list[str] = []
    found = False
    for optimizer in [item for item in gc.get_objects() if issubclass(type(item), Optimizer)]:
        for group in optimizer.param_groups:
            given = [item for item in group["params"] if id(item) in parameters]
            found |= bool(given)
            shares: dict[Any, float] = {}
            for item in given:
                kind = (item.dtype, item.dim())
                if kind not in shares:
                    try:
                        shares[kind] = _share(optimizer, group, item)
                    except Exception as error:  # any optimizer, of any library
                        shares[kind] = 2.0
                        notes.append(
                            f"{type(optimizer).__name__} could not be tried ({type(error).__name__}): "
                            "its state is taken to be twice the parameters"
                        )
                sizes[id(item)] = shares[kind] * item.numel() * item.element_size()
    if not found:
        notes.append("no torch optimizer has parameters of the model: optimizer state counts as 0")
    return sizes, list(dict.fromkeys(notes))


def _share(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> float:
    """Returns bytes of state for each byte of a parameter like this one."""
    shape = [min(size, _MOST) for size in parameter.shape]
    small = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=parameter.device))
    small.grad = torch.zeros_like(small)
    copy: Any = object.__new__(type(optimizer))
    copy.__dict__.update(vars(optimizer))
    copy.state = defaultdict(dict)
    copy.param_groups = [{**group, "params": [small]}]
    type(optimizer).step(copy)
    tensors = flatten(dict(copy.state.get(small, {})))[1]
    kept = sum(item.numel() * item.element_size() for item in tensors if item.numel() >= small.numel() > 1)
    return kept / (small.numel() * small.element_size())
