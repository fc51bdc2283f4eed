"""Forward hooks that users register: they run where the program runs, on every rank, with recorded tensors.

torch's own hooks (weight norm, spectral norm) belong to the computation and run with it. A module below whose top
somebody hooks a part is no longer called as one unit: its parts are, and the hook sees them.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from farspan.errors import RecordError
from farspan.lazy.leaf import Leaf
from farspan.lazy.torch_private import call_without_compiling

__all__ = ["call_with_user_hooks", "check_container", "has_user_hooks", "open_leaves", "without_user_hooks"]

_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")


def has_user_hooks(module: nn.Module) -> bool:
    """Whether somebody other than torch has hooked the forward of `module`."""
    hooks, pre_hooks = module._forward_hooks, module._forward_pre_hooks
    if not hooks and not pre_hooks:
        return False
    return not all(map(_is_of_torch, [*hooks.values(), *pre_hooks.values()]))


def open_leaves(leaves: Iterable[Leaf]) -> None:
    """Let no module be called as one unit that has a hooked one below its top."""
    for leaf in leaves:
        leaf.is_open |= any(map(has_user_hooks, leaf.modules[1:]))


def check_container(module: nn.Module) -> None:
    """Raise if a module whose parts are called one by one has a backward hook.

    Raises:
        RecordError: Its gradients are on several ranks, and none of them here.
    """
    if module._backward_hooks or module._backward_pre_hooks:
        raise RecordError(
            f"a backward hook on {type(module).__name__}, whose parts are called one by one.",
            why="they lie on several stages, so no rank has the gradients that the hook would get.",
            hint="hook its parts that are placed as a whole, or parameters (param.register_hook)",
        )


@contextlib.contextmanager
def without_user_hooks(*modules: nn.Module) -> Iterator[None]:
    """Run `modules` with the hooks that belong to the computation."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            if has_user_hooks(module):
                stack.enter_context(_tables(module, _FORWARD, _is_of_torch))
        yield


def call_with_user_hooks(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `forward` in the place of `module`'s, with the users' forward hooks around it."""
    with contextlib.ExitStack() as around:

        def inner(*args: Any, **kwargs: Any) -> Any:
            around.close()  # the module is itself again
            try:
                return forward(*args, **kwargs)
            finally:
                around.enter_context(_hooks_only(module))

        around.enter_context(_hooks_only(module, inner))
        return call_without_compiling(module, *args, **kwargs)


@contextlib.contextmanager
def _hooks_only(module: nn.Module, forward: Callable[..., Any] | None = None) -> Iterator[None]:
    own = module.__dict__.get("forward")
    if forward is not None:
        module.__dict__["forward"] = forward
    try:
        with _tables(module, _FORWARD, lambda hook: not _is_of_torch(hook)), _tables(module, _BACKWARD, _none):
            yield
    finally:
        if own is not None:
            module.__dict__["forward"] = own
        else:
            module.__dict__.pop("forward", None)


def _none(hook: Any) -> bool:
    return False


@contextlib.contextmanager
def _tables(module: nn.Module, names: tuple[str, ...], wanted: Callable[[Any], bool]) -> Iterator[None]:
    before = {name: module.__dict__[name] for name in names}
    for name, table in before.items():
        module.__dict__[name] = OrderedDict((key, hook) for key, hook in table.items() if wanted(hook))
    try:
        yield
    finally:
        module.__dict__.update(before)


def _is_of_torch(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch.")
