"""Hooks that users register on modules: they run where the program runs, on every rank, with recorded tensors.

Backward hooks are torch's own way: an identity function before the module and one behind it, with hooks on these.

torch's own hooks (weight norm, spectral norm) belong to the computation and run with it. A module below whose top
somebody hooks a part is no longer called as one unit: its parts are, and the hook sees them. So it is while there are
hooks on all modules.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.utils.hooks import BackwardHook

from farspan.call.leaf import Leaf
from farspan.call.module_tables import has_user_hooks, is_of_torch
from farspan.errors import RecordError
from farspan.torch_private import (
    are_all_modules_hooked,
    forward_hook_flags,
    forward_hooks_of_all,
    has_full_backward_hooks,
)

__all__ = [
    "call_with_user_hooks",
    "check_container",
    "is_called_in_parts",
    "is_passed_over",
    "open_leaves",
    "user_forward_hooks",
    "without_user_hooks",
]

_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
_silent = threading.local()
"""`modules`: ids of those that hooks on all modules pass over in this thread, for they have been called already."""


def open_leaves(leaves: Iterable[Leaf]) -> None:
    """Let no module be called as one unit that has a hooked one below its top."""
    for leaf in leaves:
        leaf.is_open |= any(map(has_user_hooks, leaf.modules[1:]))


def is_called_in_parts(leaf: Leaf) -> bool:
    """Returns whether the modules inside `leaf` are called one by one; hooks on all modules see each of them."""
    return leaf.is_open or (len(leaf.modules) > 1 and are_all_modules_hooked())


def check_container(module: nn.Module) -> None:
    """Raise if a module whose parts are called one by one has a backward hook of the deprecated kind.

    Raises:
        RecordError: It would be called with what one operation of one part gives.
    """
    if module._is_full_backward_hook is False and module._backward_hooks:
        raise RecordError(
            f"register_backward_hook on {type(module).__name__}, whose parts are called one by one.",
            why="it is called with the gradients of the last operation inside, which is on one rank.",
            hint="module.register_full_backward_hook(hook)",
        )


@contextlib.contextmanager
def without_user_hooks(*modules: nn.Module) -> Iterator[None]:
    """Run `modules` with the hooks that belong to the computation."""
    with contextlib.ExitStack() as stack:
        if are_all_modules_hooked():
            stack.enter_context(_passed_over(modules))
        for module in modules:
            if has_user_hooks(module):
                stack.enter_context(_tables(module, _FORWARD, is_of_torch))
            if has_full_backward_hooks(module):
                stack.enter_context(_tables(module, _BACKWARD, lambda hook: False))
        yield


def is_passed_over(module: nn.Module) -> bool:
    """Returns whether hooks on all modules have been called already for the call of `module` that is running."""
    return id(module) in getattr(_silent, "modules", ())


def call_with_user_hooks(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call `forward` in the place of `module`'s, with the users' hooks around it, those on all modules first."""
    called, result, around = set[int](), None, None
    before, after = forward_hooks_of_all()
    try:
        for key, hook in [*before.items(), *_users(module._forward_pre_hooks)]:
            args, kwargs = _before(module, hook, args, kwargs, key in module._forward_pre_hooks_with_kwargs)
        if has_full_backward_hooks(module):
            around = BackwardHook(module, module._get_backward_hooks()[0], module._get_backward_pre_hooks())
            args = around.setup_input_hook(args)
        result = forward(*args, **kwargs)
        for key, hook in [*after.items(), *_users(module._forward_hooks)]:
            called.add(key)
            changed = _after(module, key, hook, args, kwargs, result)
            result = result if changed is None else changed
    except Exception:
        for key, hook in [*after.items(), *_users(module._forward_hooks)]:
            is_always = forward_hook_flags(key)[1] or key in module._forward_hooks_always_called
            if is_always and key not in called:
                try:
                    _after(module, key, hook, args, kwargs, result)
                except Exception as error:
                    warnings.warn(f"a forward hook with always_call=True raised too: {error}", stacklevel=2)
        raise
    return result if around is None else around.setup_output_hook(result)


def user_forward_hooks(module: nn.Module) -> list[Any]:
    """Returns the users' hooks before and after the forward of `module`, those on all modules too."""
    tables = (*forward_hooks_of_all(), module._forward_pre_hooks, module._forward_hooks)
    return [hook for table in tables for _, hook in _users(table)]


def _users(hooks: dict[int, Any]) -> list[tuple[int, Any]]:
    return [(key, hook) for key, hook in hooks.items() if not is_of_torch(hook)]


def _before(module: nn.Module, hook: Any, args: Any, kwargs: Any, is_with_kwargs: bool) -> tuple[Any, Any]:
    """Returns the arguments as a pre-hook leaves them."""
    result = hook(module, args, kwargs) if is_with_kwargs else hook(module, args)
    if result is None:
        return args, kwargs
    if not is_with_kwargs:
        return (result if isinstance(result, tuple) else (result,)), kwargs
    if not (isinstance(result, tuple) and len(result) == 2):
        raise RuntimeError(f"forward pre-hook must return None or a tuple of (new_args, new_kwargs), but got {result}.")
    return result


def _after(module: nn.Module, key: int, hook: Any, args: Any, kwargs: Any, result: Any) -> Any:
    if key in module._forward_hooks_with_kwargs or forward_hook_flags(key)[0]:
        return hook(module, args, kwargs, result)
    return hook(module, args, result)


@contextlib.contextmanager
def _tables(module: nn.Module, names: tuple[str, ...], wanted: Callable[[Any], bool]) -> Iterator[None]:
    before = {name: module.__dict__[name] for name in names}
    for name, table in before.items():
        module.__dict__[name] = OrderedDict((key, hook) for key, hook in table.items() if wanted(hook))
    try:
        yield
    finally:
        module.__dict__.update(before)


@contextlib.contextmanager
def _passed_over(modules: tuple[nn.Module, ...]) -> Iterator[None]:
    """Let hooks on all modules pass over `modules`, in the body and this thread: they have been called already."""
    for table in forward_hooks_of_all():
        for key, hook in [*table.items()]:
            if not isinstance(hook, _Passing):
                table[key] = _Passing(hook)
    outer: frozenset[int] = getattr(_silent, "modules", frozenset())
    _silent.modules = outer.union(map(id, modules))
    try:
        yield
    finally:
        _silent.modules = outer


class _Passing:
    """A hook on all modules that passes over some; its key in torch's table, by which it is removed, is the same."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        functools.update_wrapper(self, hook, updated=())
        self._hook = hook

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        return None if is_passed_over(module) else self._hook(module, *given)
