"""Forward hooks that users register: they run where the program runs, on every rank, with recorded tensors.

torch's own hooks (weight norm, spectral norm) belong to the computation and run with it. A module below whose top
somebody hooks a part is no longer called as one unit: its parts are, and the hook sees them.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from farspan.errors import RecordError
from farspan.graph import Value
from farspan.lazy.leaf import Leaf
from farspan.lazy.torch_private import call_without_compiling

if TYPE_CHECKING:
    from farspan.graph import Call, Graph
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


def open_leaves(leaves: dict[int, Leaf]) -> None:
    """Let no module be called as one unit that has a hooked one below its top."""
    for leaf in leaves.values():
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
    marked: list[tuple[Graph, int]] = []
    with contextlib.ExitStack() as around:

        def inner(*args: Any, **kwargs: Any) -> Any:
            around.close()  # the module is itself again
            try:
                result = forward(*args, **kwargs)
                marked.append((recorder.current, len(recorder.current.calls)))
                return result
            finally:
                around.enter_context(_hooks_only(module))

        around.enter_context(_hooks_only(module, inner))
        result = call_without_compiling(module, *args, **kwargs)
    if any(module.__dict__[name] for name in _BACKWARD):
        for graph, number in marked:
            for call in graph.calls[number:]:
                call.hooked = type(module).__name__
                recorder.has_hooked_calls = True
    return result


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
