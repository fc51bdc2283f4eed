"""Reads and changes this thread's stack of torch function modes; runs torch's own functions past overrides."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import (
    DisableTorchFunction,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)

__all__ = [
    "disabled_torch_function",
    "is_mode_active",
    "no_dispatch",
    "put_modes",
    "run_without_modes_of",
    "take_modes_of",
    "without_any_mode",
    "without_modes_of",
    "without_overrides",
]

no_dispatch = torch._C._DisableTorchDispatch
"""Operations in its body are seen by no dispatch mode."""
disabled_torch_function = torch._C._disabled_torch_function_impl
"""A `__torch_function__` for classes whose tensors are seen by function modes only."""


def take_modes_of(recorder: Any) -> list[Any]:
    """Take the modes that record for `recorder` off this thread's function mode stack; `put_modes` puts all back."""
    stack = [_pop_torch_function_stack() for _ in range(_len_torch_function_stack())]
    for mode in reversed(stack):
        if getattr(mode, "recorder", None) is not recorder:
            _push_on_torch_function_stack(mode)
    return stack


def put_modes(stack: list[Any]) -> None:
    """Make the function mode stack what it was before `take_modes_of` returned `stack`."""
    for _ in range(_len_torch_function_stack()):
        _pop_torch_function_stack()
    for mode in reversed(stack):
        _push_on_torch_function_stack(mode)


@contextlib.contextmanager
def without_modes_of(recorder: Any) -> Iterator[None]:
    """Run the body without the modes that record for `recorder`, and under `no_grad` where inference mode is on: what
    outlives the program's inference mode must be neither saved by autograd nor written to as one of its tensors.
    """
    stack = take_modes_of(recorder)
    try:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                yield
        else:
            yield
    finally:
        put_modes(stack)


@contextlib.contextmanager
def without_any_mode() -> Iterator[None]:
    """Run the body for real: no function mode and no dispatch mode, ours or the program's, sees what it does."""
    with DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def is_mode_active(kind: type) -> bool:
    """Returns whether a mode of class `kind` is on this thread's function mode stack."""
    stack = [_pop_torch_function_stack() for _ in range(_len_torch_function_stack())]
    for mode in reversed(stack):
        _push_on_torch_function_stack(mode)
    return any(isinstance(mode, kind) for mode in stack)


def run_without_modes_of(recorder: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` without the modes that record for `recorder`."""
    with without_modes_of(recorder):
        return function(*args)


def without_overrides(function: Any) -> Callable[..., Any] | None:
    """Returns a function of torch's that runs its own Python for tensors of any class; None if it is not Python.

    It does not ask whether a tensor's class takes the call as a whole; the functions that it calls do ask. Its globals
    are as they are now, also where the program has replaced some.
    """
    if not isinstance(function, types.FunctionType):
        return None
    room = {**function.__globals__, "has_torch_function": lambda tensors: False}
    body = types.FunctionType(function.__code__, room, function.__name__, function.__defaults__, function.__closure__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body
