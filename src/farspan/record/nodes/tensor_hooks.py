"""Hooks on recorded tensors: every rank calls them, with the gradient that reaches the tensor.

They belong to the call that has made the tensor, as autograd's belong to its node. A backward stops there
(`graph.backward`): the gradient is a recorded value then, and what the hooks make of it goes on.

torch's hooks on modules rest on these: it puts an identity function before the module and one behind it, with hooks on
both.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from farspan.call.function_call import FunctionCall

if TYPE_CHECKING:
    from farspan.graph import Value
    from farspan.record.recording import Recorded

__all__ = ["CallHooks", "Node", "changed", "is_retained", "register_hook", "retain_grad"]


class CallHooks:
    """The program's hooks that receive the gradients of a call's outputs, in the order of autograd."""

    __slots__ = ("after", "before", "of_tensors", "retaining")

    def __init__(self) -> None:
        self.of_tensors: OrderedDict[int, tuple[int, Any]] = OrderedDict()
        """The output and the hook, by number of the handle."""
        self.retaining: dict[int, weakref.ref[Recorded]] = {}
        """The tensor that keeps its gradient, by output."""
        self.before: OrderedDict[int, Any] = OrderedDict()
        """Called with the gradients of all outputs."""
        self.after: OrderedDict[int, Any] = OrderedDict()
        """Hooks of an identity function, which receive the gradients of its inputs and of its outputs."""

    def __bool__(self) -> bool:
        is_retaining = any(reference() is not None for reference in self.retaining.values())
        return bool(self.of_tensors or self.before or self.after) or is_retaining

    def run(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns what goes on instead of `gradients`, one for each output; None where there is none."""
        now = list(gradients)
        for number, hook in [*self.of_tensors.values()]:
            if now[number] is not None:
                now[number] = changed(hook, now[number], hook(now[number]))
        for number, reference in self.retaining.items():
            lazy = reference()
            if lazy is not None and now[number] is not None:
                lazy.grad = now[number].clone() if lazy.grad is None else lazy.grad + now[number]
        for hook in [*self.before.values()]:
            now = _all_changed(hook, now, hook(tuple(now)))
        outputs = tuple(now)
        for hook in [*self.after.values()]:
            now = _all_changed(hook, now, hook(tuple(now), outputs))
        return now


def changed(hook: Any, gradient: Any, result: Any) -> Any:
    """Returns the gradient after a hook has returned `result`; the errors are torch's."""
    if result is None:
        return gradient
    name = getattr(hook, "__name__", type(hook).__name__)
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"hook '{name}' has returned an incompatible object type")
    if gradient is None:
        raise RuntimeError("can't replace a None gradient with a non-None value")
    if result.dtype != gradient.dtype:
        raise RuntimeError(f"hook '{name}' has changed the type of value")
    if result.shape != gradient.shape:
        raise RuntimeError(f"hook '{name}' has changed the size of value")
    return result


def _all_changed(hook: Any, gradients: list[Any], results: Any) -> list[Any]:
    if results is None:
        return gradients
    results = results if isinstance(results, tuple) else (results,)
    if len(results) != len(gradients):
        name = getattr(hook, "__name__", type(hook).__name__)
        raise RuntimeError(
            f"hook '{name}' has returned an incorrect number of values (got {len(results)}, "
            f"but expected {len(gradients)})"
        )
    return [
        None if result is None else changed(hook, gradient, result)
        for gradient, result in zip(gradients, results, strict=True)
    ]


def register_hook(lazy: Recorded, hook: Any) -> RemovableHandle:
    """`lazy.register_hook(hook)`."""
    if not lazy.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    table = _hooks_of(lazy).of_tensors
    handle = RemovableHandle(table)
    table[handle.id] = (lazy._value.index, hook)
    return handle


def retain_grad(lazy: Recorded) -> None:
    """`lazy.retain_grad()`."""
    if not lazy.requires_grad:
        raise RuntimeError("can't retain_grad on Tensor that has requires_grad=False")
    _hooks_of(lazy).retaining[lazy._value.index] = weakref.ref(lazy)


def is_retained(lazy: Recorded) -> bool:
    """`lazy.retains_grad`."""
    call = lazy._value.call
    return call is not None and call.hooks is not None and lazy._value.index in call.hooks.retaining


def check_unhooked(lazy: Recorded, name: str, *, is_shared: bool) -> None:
    """Raise if `name` is to write in place into a tensor whose gradient the program has asked for.

    Args:
        lazy: What is written.
        name: What writes.
        is_shared: Whether its memory is that of others, too.
    """
    call, index = lazy._value.call, lazy._value.index
    if call is None or call.hooks is None:
        return
    has_hook = is_shared and any(number == index for number, _ in call.hooks.of_tensors.values())
    if has_hook or index in call.hooks.retaining:
        lazy._recorder.refuse(
            f"{name} writes in place into a tensor that has a hook, or retain_grad()",
            why="the gradient would be that of what is written, and of what shares memory with it.",
            hint="write first, or out of place (y = y + 1)",
        )


def _check_unwritten(lazy: Recorded) -> None:
    """Raise if its memory was written while views of it were held: torch decides by how it was made in a module what of
    their gradient comes to which of them.
    """
    root = lazy if lazy._view is None else lazy._view.root
    is_shared = root is not lazy or any(member() is not None for member in root._family or ())
    if is_shared and getattr(root, "_is_written_through", False):
        lazy._recorder.refuse(
            "a hook, or retain_grad(), on a tensor that shares its memory, and has been written in place",
            why="which gradient comes to it depends on what it is a view of inside of a module.",
            hint="write out of place (y = y + 1), or take the view of a clone()",
        )


def _hooks_of(lazy: Recorded) -> CallHooks:
    recorder = lazy._recorder
    _check_unwritten(lazy)
    recorder.deferred.record_one(lazy)
    value = lazy._value
    call = value.call
    if call is None:
        recorder.refuse(f"a hook cannot be registered on {value.describe()}", hint="register it on what is made of it")
    if call.is_repeated:
        recorder.refuse(
            f"a hook cannot be registered on the {value.describe()}: gradients with a history have been taken",
            why="these compute it again, so that not all of its gradient comes to it.",
            hint="register the hook, or retain_grad(), on what is made of it",
        )
    if value.pending and call.graph is not recorder.current:
        recorder.engine.flush("a hook is registered on what an earlier backward goes through")
    if value.pending:
        recorder.current.cut_behind(call)
    if call.hooks is None:
        call.hooks = CallHooks()
    recorder.has_hooked_calls = True
    return call.hooks


class Node:
    """The `grad_fn` of a recorded tensor."""

    __slots__ = ("_lazy",)

    def __init__(self, lazy: Recorded) -> None:
        self._lazy = lazy

    @property
    def _value(self) -> Value:
        return self._lazy._value

    def name(self) -> str:
        """Returns the name of the function's backward, or of what was called."""
        call = self._value.call
        target = None if call is None else call.target
        if isinstance(target, FunctionCall):
            return f"{target.function.__name__}Backward"
        return self._value.describe() if call is None else str(call.entry.name)

    @property
    def next_functions(self) -> tuple[Any, ...]:
        """Nobody knows them before the call has run."""
        return ()

    def register_prehook(self, hook: Any) -> RemovableHandle:
        """Call `hook` with the gradients of all outputs, before they go on."""
        hooks = _hooks_of(self._lazy)
        call = self._value.call
        assert call is not None
        if len(call.outputs) > 1 and not self._is_identity:
            self._refuse()
        handle = RemovableHandle(hooks.before)
        hooks.before[handle.id] = hook
        return handle

    def register_hook(self, hook: Any) -> RemovableHandle:
        """Call `hook` with the gradients of the inputs, and of the outputs."""
        if not self._is_identity:
            self._refuse()
        hooks = _hooks_of(self._lazy)
        handle = RemovableHandle(hooks.after)
        hooks.after[handle.id] = hook
        return handle

    @property
    def _is_identity(self) -> bool:
        return self.name() == "BackwardHookFunctionBackward"

    def _refuse(self) -> None:
        self._lazy._recorder.refuse(
            f"a hook cannot be registered on the grad_fn of {self._value.describe()}",
            hint="tensor.register_hook(hook), or module.register_full_backward_hook(hook)",
        )

    def __repr__(self) -> str:
        return f"<{self.name()}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and other._value.call is self._value.call

    def __hash__(self) -> int:
        return id(self._value.call)
