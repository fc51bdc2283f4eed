"""`torch.autograd.Function.apply` on recorded tensors: one call, run at its owner, backward and all.

`apply` is no torch function: no mode sees it, and its forward would be recorded without its backward. So its code is
exchanged in place, which also catches `fn = MyFunction.apply` taken before farspan was imported.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from farspan.lazy.randomness import active, called_inside, key_of_function, replayed
from farspan.lazy.tensor import LazyTensor

__all__ = ["FunctionCall", "install_apply"]


class FunctionCall:
    """What a recorded `apply` calls; equal for the same Function, so that its metadata is cached."""

    __slots__ = ("function",)

    def __init__(self, function: type[Function]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionCall) and other.function is self.function

    def __hash__(self) -> int:
        return hash(self.function)

    def __str__(self) -> str:
        return f"{self.function.__name__}.apply"


_original: Any = None


def apply(function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record the call if a lazy tensor is among its arguments, else run it."""
    if function is CheckpointFunction and _is_in_a_container():
        return _run_checkpointed(*args)
    for item in args:
        if type(item) is LazyTensor:
            if function is CheckpointFunction:
                return _run_checkpointed(*args)
            return item._recorder.dispatch(FunctionCall(function), args, kwargs)
    if active.scope is None and active.recorder is None:
        return _original(function, *args, **kwargs)
    if function is CheckpointFunction:  # the reentrant checkpoint: runs its first argument now, and in the backward
        return _original(function, replayed(args[0], is_first=True), *args[1:], **kwargs)
    return called_inside(key_of_function(FunctionCall(function)), _original, function, *args, **kwargs)


def _is_in_a_container() -> bool:
    recorder = active.recorder
    return recorder is not None and recorder.is_recording and recorder.frame is not recorder.root


def _run_checkpointed(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
    """What a reentrant checkpoint runs is recorded part by part: its modules may lie on several stages.

    Gradients flow as through the checkpoint, which gives none where no argument needs one.
    """
    needs_gradient = any(isinstance(item, torch.Tensor) and item.requires_grad for item in args)
    with torch.set_grad_enabled(torch.is_grad_enabled() and needs_gradient):
        return function(*args)


def install_apply() -> None:
    """Exchange the code of `Function.apply`, once in a process."""
    global _original
    if _original is not None:
        return
    plain: Any = Function.apply.__func__  # type: ignore[attr-defined]
    _original = types.FunctionType(
        plain.__code__, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    stand_in = _stand_in if plain.__closure__ is None else _stand_in_with_a_cell(None)
    plain.__code__ = stand_in.__code__


def _stand_in(cls: Any, *args: Any, **kwargs: Any) -> Any:
    from farspan.lazy.ops.autograd_function import apply  # its globals are torch's

    return apply(cls, args, kwargs)


def _stand_in_with_a_cell(cell: Any) -> Any:
    """The same for an `apply` that uses super(): code can be exchanged only for code with as many free variables."""

    def stand_in(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from farspan.lazy.ops.autograd_function import apply

        return apply(cls, args, kwargs) if cell is not apply else None

    return stand_in
