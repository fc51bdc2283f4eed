"""The target of a recorded `torch.autograd.Function.apply`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.autograd import Function

__all__ = ["FunctionCall"]


class FunctionCall:
    """One autograd function as the target of calls; equal for the same function, so that its metadata is cached."""

    __slots__ = ("around", "function", "modules", "runs_code_backward")

    def __init__(self, function: type[Function], arguments: Sequence[Any] = ()) -> None:
        self.function = function
        self.modules = tuple([item for item in arguments if isinstance(item, nn.Module)])
        """Which its backward could change."""
        self.runs_code_backward = bool(self.modules)
        self.around = -1
        """The number of the snapshot of what the code of the function reads beside its arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionCall) and (other.function, other.around) == (self.function, self.around)

    def __hash__(self) -> int:
        return hash(self.function)

    def __str__(self) -> str:
        return f"{self.function.__name__}.apply"
