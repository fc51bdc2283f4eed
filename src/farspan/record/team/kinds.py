"""Tells apart the functions that a split stage takes: what is recorded like any other, and what writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from farspan.call.function_call import FunctionCall
from farspan.call.leaf import WholeError
from farspan.call.naming import RUNNING_STATISTICS, name_of
from farspan.record.ops.explicit_placement import PLAIN_TO
from farspan.record.ops.overrides import HANDLERS

if TYPE_CHECKING:
    from farspan.graph import Meta

__all__ = ["HAS_LIMIT", "LIKE_ANOTHER", "has_rules", "is_matrix", "refusal", "writes_apart"]

LIKE_ANOTHER: dict[Any, Any] = {
    torch.Tensor.view_as: torch.Tensor.view,
    torch.Tensor.reshape_as: torch.Tensor.reshape,
    torch.Tensor.expand_as: torch.Tensor.expand,
}
_T: Any = torch.Tensor
HAS_LIMIT = frozenset([torch.renorm, _T.renorm, _T.renorm_])
"""Functions that do nothing up to a limit, so that one try does not show what they do."""
_WRITES = frozenset([_T.data.__set__, _T.apply_, _T.map_, _T.map2_])


def has_rules(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a function is recorded like any other, so that it may be recorded for each part."""
    if function is PLAIN_TO:
        given = (*args[1:], *kwargs.values())
        return all(isinstance(item, (torch.dtype, bool, torch.Tensor, torch.memory_format)) for item in given)
    if function in RUNNING_STATISTICS:
        return (args[1] if len(args) > 1 else kwargs.get("running_mean")) is None
    if type(function) is FunctionCall or function in HANDLERS or function.__name__.startswith("_foreach_"):
        return False
    return not (getattr(function, "__module__", None) or "").startswith("torch.distributed")


def is_matrix(meta: Meta) -> bool:
    """Returns whether a parameter has several numbers along more than one dimension."""
    return sum(size > 1 for size in meta.shape) > 1


def writes_apart(function: Any) -> bool:
    """Returns whether a function writes into its first argument in a way of its own."""
    return function in _WRITES or (name_of(function).startswith("_foreach_") and name_of(function).endswith("_"))


def refusal(function: Any) -> WholeError:
    """Returns the error of what can be done by a module that is called as one unit."""
    return WholeError(
        f"{name_of(function)} writes into a tensor of which the ranks of a stage have parts.",
        why="it cannot be done part by part, and the parts would not see it.",
        hint="write out of place (y = y + 1), or leave out tensor_parallel= of farspan.distribute",
    )
