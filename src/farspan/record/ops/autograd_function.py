"""`torch.autograd.Function.apply` on recorded tensors: one call, run at its owner, backward and all.

`apply` is no torch function: no mode sees it, and its forward would be recorded without its backward. So its code is
exchanged in place, which also catches `fn = MyFunction.apply` taken before farspan was imported.

Since torch 2.14 it is written in C: who holds a bound one is found, and given another. One that is not found (in a
tuple, in a `functools.partial`) is an error where its result is used.
"""

from __future__ import annotations

import gc
import types
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from farspan.call.draws.frame import key_of_function
from farspan.call.draws.scope import active, called_inside, replayed
from farspan.call.function_call import FunctionCall
from farspan.record.team.calls import checkpointed
from farspan.record.tensor import LazyTensor
from farspan.torch_private import DisableTorchFunction, raw_grad_fn

if TYPE_CHECKING:
    from farspan.record.recording import Recording

__all__ = ["MAY_HIDE_HISTORY", "check_history", "install_apply"]

MAY_HIDE_HISTORY = not isinstance(Function.__dict__["apply"], classmethod)
"""True if `Function.apply` is no Python function in this release, so that one that was taken cannot be watched."""


_original: Any = None


def apply(function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record the call if a lazy tensor is among its arguments, else run it."""
    if function is CheckpointFunction and _is_in_a_container():
        return _run_checkpointed(*args)
    recorder = _recorder_for(args)
    if recorder is not None:
        if function is CheckpointFunction:
            return _run_checkpointed(*args)
        call = FunctionCall(function, args)
        recorder.held_objects.see_function(call)
        recorder.changing_backwards.see(call)
        for item in args:
            if (
                isinstance(item, LazyTensor) and type(item) is not LazyTensor
            ):  # of a batch that is cut, or of a split stage
                return type(item).__torch_function__(call, (), args, kwargs)
        return recorder.splitting.takes_operations.dispatch(call, args, kwargs)
    if active.scope is None and active.recorder is None:
        return _original(function, *args, **kwargs)
    if function is CheckpointFunction:  # the reentrant checkpoint: runs its first argument now, and in the backward
        return _original(function, replayed(args[0], is_first=True), *args[1:], **kwargs)
    return called_inside(key_of_function(FunctionCall(function)), _original, function, *args, **kwargs)


def _recorder_for(args: tuple[Any, ...]) -> Recording | None:
    """Returns what records the call: that of a recorded tensor, or of a parameter of the model."""
    recorder = active.recorder
    placed = recorder.placed if recorder is not None and recorder.is_recording else ()
    for item in args:
        if isinstance(item, LazyTensor):
            return item._recorder
        if id(item) in placed:
            return recorder
    return None


def _is_in_a_container() -> bool:
    recorder = active.recorder
    return recorder is not None and recorder.is_recording and recorder.frame is not recorder.root


def _run_checkpointed(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
    """Records what a reentrant checkpoint runs part by part: its modules may lie on several stages.

    Gradients flow as through the checkpoint, which gives none where no argument needs one.
    """
    needs_gradient = any(isinstance(item, torch.Tensor) and item.requires_grad for item in args)
    with torch.set_grad_enabled(torch.is_grad_enabled() and needs_gradient), checkpointed(function):
        return function(*args)


def install_apply() -> None:
    """Let every `Function.apply` of the program go through `apply`, once in a process."""
    global _original
    if _original is not None:
        return
    plain: Any = Function.__dict__["apply"]
    if MAY_HIDE_HISTORY:

        def original(function: type[Function], *args: Any, **kwargs: Any) -> Any:
            return plain.__get__(None, function)(*args, **kwargs)

        _original = original
        Function.apply = classmethod(_stand_in)  # type: ignore[assignment]
        _exchange_bound_apply()
        return
    plain = plain.__func__
    _original = types.FunctionType(
        plain.__code__, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    stand_in = _stand_in if plain.__closure__ is None else _stand_in_with_a_cell(None)
    plain.__code__ = stand_in.__code__


def _stand_in(cls: Any, *args: Any, **kwargs: Any) -> Any:
    from farspan.record.ops.autograd_function import apply  # its globals are torch's

    return apply(cls, args, kwargs)


def _stand_in_with_a_cell(cell: Any) -> Any:
    """Returns the same for an `apply` that uses super(): code can be exchanged only for code with as many free
    variables."""

    def stand_in(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from farspan.record.ops.autograd_function import apply

        return apply(cls, args, kwargs) if cell is not apply else None

    return stand_in


def check_history(recorder: Recording, lazy: LazyTensor) -> None:
    """Raise if `lazy` came out of an `apply` that nobody has seen: autograd itself has put it down in its graph.

    Raises:
        RecordError: It did.
    """
    with DisableTorchFunction():
        has_history = raw_grad_fn(lazy) is not None
    if has_history:
        recorder.refuse(
            "an autograd function has run on recorded tensors without being recorded",
            hint="call it as MyFunction.apply(x): its `apply` was taken before farspan.distribute, and is kept\n"
            "in a tuple or a functools.partial",
        )


def _exchange_bound_apply() -> None:
    """Let every dictionary, list, cell and class that holds `MyFn.apply` hold what `MyFn.apply` is now."""
    taken = [item for item in gc.get_objects() if _is_apply(item)]
    if not taken:
        return
    for holder in gc.get_referrers(*taken):
        if holder is not taken:
            _exchange(holder)


def _is_apply(item: Any) -> bool:
    return (
        type(item) is types.BuiltinMethodType
        and item.__name__ == "apply"
        and isinstance(item.__self__, type)
        and issubclass(item.__self__, Function)
    )


def _exchange(holder: Any) -> None:
    if type(holder) is dict:
        classes = [item for item in gc.get_referrers(holder) if isinstance(item, type)]
        for name, item in list(holder.items()):
            if not _is_apply(item):
                continue
            owners = [each for each in classes if vars(each).get(name) is item]
            for owner in owners:
                setattr(owner, name, item.__self__.apply)
            if not owners:
                holder[name] = item.__self__.apply
    elif type(holder) is list:
        holder[:] = [item.__self__.apply if _is_apply(item) else item for item in holder]
    elif type(holder) is types.CellType:
        holder.cell_contents = holder.cell_contents.__self__.apply
    elif not isinstance(holder, type):  # an object that keeps its attributes without a dictionary
        for name, item in list(getattr(holder, "__dict__", {}).items()):
            if _is_apply(item):
                object.__setattr__(holder, name, item.__self__.apply)
