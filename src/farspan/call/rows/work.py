"""Counts the work of the operations of a whole batch, where the number of its rows is a symbol."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from farspan.torch_private import flops_of, hint_of

__all__ = ["RowsWork", "work_of"]

RowsWork = tuple[float, float, float]
"""Of an operation the floating-point operations, and the bytes that it moves: those of rows, and those of weights,
which are as many for a part of the batch.
"""


def work_of(
    func: Any, args: Any, kwargs: dict[str, Any], result: Any, tensors: Sequence[torch.Tensor]
) -> RowsWork | None:
    """Returns the work of an aten operation; None for one that makes views.

    Args:
        func: Which.
        args: What it is given.
        kwargs: And by name.
        result: What it has returned.
        tensors: All that are among them.
    """
    if any(item.alias_info is not None and not item.alias_info.is_write for item in func._schema.returns):
        return None
    moved = [0.0, 0.0]
    for item in tensors:
        is_fixed = all(isinstance(size, int) for size in item.shape)
        moved[is_fixed] += prod(map(hint_of, item.shape)) * item.dtype.itemsize
    return float(hint_of(flops_of(func, args, kwargs, result))), moved[0], moved[1]
