"""The marks of tensors in a step: that one rank alone has it (`step_view`), and what the program knows it as."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from farspan.graph import Value

__all__ = ["is_own", "make_known_as", "make_own", "make_replicated", "shown_value", "without_marks"]

_tensor: Any = torch.Tensor
_tensor._farspan_is_own = False
_tensor._farspan_shown_as = None


def make_own(result: Any) -> Any:
    """Let the tensors of `result` be known as those that only this rank has."""
    if isinstance(result, torch.Tensor):
        if not isinstance(result, nn.Parameter):  # of which it is known where they are, also of those that are away
            result._farspan_is_own = True  # type: ignore[attr-defined]
    elif isinstance(result, (list, tuple)):
        for item in result:
            make_own(item)
    return result


def make_replicated(tensor: torch.Tensor) -> torch.Tensor:
    """Let it be known as one that every rank has."""
    tensor._farspan_is_own = False  # type: ignore[attr-defined]
    return tensor


def is_own(tensor: torch.Tensor) -> bool:
    """Returns whether only this rank has it, of all tensors in a step."""
    return tensor._farspan_is_own  # type: ignore[attr-defined]


def make_known_as(tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """Let it be known that a tensor of a step is what the program has got as a recorded tensor of `value`."""
    vars(tensor)["_farspan_shown_as"] = weakref.ref(value)
    return tensor


def shown_value(tensor: torch.Tensor) -> Value | None:
    """Returns the value as which the program still holds a tensor of a step; None where it does not."""
    known = tensor._farspan_shown_as  # type: ignore[attr-defined]
    value = None if known is None else known()
    return value if value is not None and value.lazy is not None and value.lazy() is not None else None


def without_marks(tensor: torch.Tensor) -> torch.Tensor:
    """Let nothing be known of a tensor that becomes the program's, which may write it into a file."""
    for name in ("_farspan_is_own", "_farspan_shown_as"):
        vars(tensor).pop(name, None)
    return tensor
