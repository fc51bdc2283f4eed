"""Forward hooks that users register: they run where the program runs, on every rank, with recorded tensors.

torch's own hooks (weight norm, spectral norm) belong to the computation and run with it. A module below whose top
somebody hooks a part is no longer called as one unit: its parts are, and the hook sees them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from farspan.errors import RecordError
from farspan.graph import Value
from farspan.lazy.leaf import Leaf

if TYPE_CHECKING:
    from farspan.graph import Call
    from farspan.lazy.recorder import Recorder

__all__ = [
    "call_with_user_hooks",
    "check_container",
    "check_hooked",
    "has_user_hooks",
    "open_leaves",
    "without_user_hooks",
]

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
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    recorder: Recorder,
) -> Any:
    """Call `forward` in the place of `module`'s, with the users' forward hooks around it.

    Where the module has backward hooks too, they run with it, where it is placed: they do not see the gradient of what
    a forward hook computes. Such calls are marked, so that no backward goes through them.
    """
    graph, number, called, result = recorder.current, 0, set[int](), None
    try:
        for key, hook in _users(module._forward_pre_hooks):
            args, kwargs = _before(module, hook, args, kwargs, key in module._forward_pre_hooks_with_kwargs)
        result = forward(*args, **kwargs)
        graph, number = recorder.current, len(recorder.current.calls)
        for key, hook in _users(module._forward_hooks):
            called.add(key)
            changed = _after(module, key, hook, args, kwargs, result)
            result = result if changed is None else changed
    except Exception:
        for key, hook in _users(module._forward_hooks):
            if key in module._forward_hooks_always_called and key not in called:
                try:
                    _after(module, key, hook, args, kwargs, result)
                except Exception as error:
                    warnings.warn(f"a forward hook with always_call=True raised too: {error}", stacklevel=2)
        raise
    if any(module.__dict__[name] for name in _BACKWARD):
        for call in graph.calls[number:]:
            call.hooked = type(module).__name__
            recorder.has_hooked_calls = True
    return result


def _users(hooks: dict[int, Any]) -> list[tuple[int, Any]]:
    return [(key, hook) for key, hook in hooks.items() if not _is_of_torch(hook)]


def _before(module: nn.Module, hook: Any, args: Any, kwargs: Any, is_with_kwargs: bool) -> tuple[Any, Any]:
    """The arguments as a pre-hook leaves them."""
    result = hook(module, args, kwargs) if is_with_kwargs else hook(module, args)
    if result is None:
        return args, kwargs
    if not is_with_kwargs:
        return (result if isinstance(result, tuple) else (result,)), kwargs
    if not (isinstance(result, tuple) and len(result) == 2):
        raise RuntimeError(f"forward pre-hook must return None or a tuple of (new_args, new_kwargs), but got {result}.")
    return result


def _after(module: nn.Module, key: int, hook: Any, args: Any, kwargs: Any, result: Any) -> Any:
    if key in module._forward_hooks_with_kwargs:
        return hook(module, args, kwargs, result)
    return hook(module, args, result)


def check_hooked(roots: Iterable[Value]) -> None:
    """Raise if a backward from `roots` goes through what a forward hook has computed beside a backward hook.

    Raises:
        RecordError: The backward hook would see another gradient than in one process.
    """
    seen: set[Call] = set()
    stack = [root.call for root in roots]
    while stack:
        call = stack.pop()
        if call is None or call in seen or call.arguments is None:
            continue
        seen.add(call)
        if call.hooked:
            raise RecordError(
                f"{call.hooked} has a backward hook, and a forward hook that computes what gradient flows through.",
                why=f"the backward hook runs with the module, where it is placed, and would not see the share of\n"
                f"{call.describe()}",
                hint="compute it in the module's forward, or leave out one of the hooks",
            )
        stack += [
            item.call for item in map(call.arguments.__getitem__, call.entry.differentiable) if type(item) is Value
        ]


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
