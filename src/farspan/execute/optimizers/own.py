"""The mark of tensors in a step that one rank alone has (`step_view`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["is_own", "make_own", "make_replicated"]

_tensor: Any = torch.Tensor
_tensor._farspan_is_own = False


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
