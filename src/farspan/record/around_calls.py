"""What is around a call that is recorded: modes, and transformations such as `vmap`.

a function mode of the program's own      sees torch functions: modules are called part by part under it
a dispatch mode, torch.func, dual levels  would see what runs later and elsewhere: refused
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.nn.utils import parametrize

from farspan.call.draws.scope import active
from farspan.call.leaf import Leaf, WholeError
from farspan.call.naming import find_where, format_where
from farspan.call.user_hooks import is_called_in_parts
from farspan.errors import RecordError
from farspan.record.tensor import LazyTensor
from farspan.torch_private import is_caching_parametrizations, show_ways_into_func, without_modes_of
from farspan.torch_private.flags import (
    DeviceContext,
    dispatch_modes,
    function_modes,
    is_nothing_around,
    transformation,
)

if TYPE_CHECKING:
    from farspan.record.recording import Recording

__all__ = [
    "check_around",
    "check_cached",
    "install_around",
    "is_clear_around",
    "is_seen_inside",
    "refuse_trace",
]

_HINTS = {
    "vmap": (
        "per-sample gradients or vmap over a distributed model",
        "call the model on the whole batch; for gradients of single samples, backward each sample's loss by itself",
    ),
    "grad": (
        "torch.func.grad, vjp, jacrev or hessian over a distributed model",
        "torch.autograd.grad(loss, parameters) for first derivatives; for others differentiate inside one module",
    ),
    "jvp": (
        "torch.func.jvp, jacfwd or dual numbers over a distributed model",
        "put what is differentiated into one module, and name that module in the plan",
    ),
}


def is_seen_inside(recorder: Recording, leaf: Leaf) -> bool:
    """Returns whether the program has hooks or a function mode on that want to see what happens inside a leaf."""
    if is_called_in_parts(leaf):
        return True
    for mode in function_modes():
        if getattr(mode, "recorder", None) is not recorder and not isinstance(mode, DeviceContext):
            return True
    return False


def check_cached(recorder: Recording, module: nn.Module) -> None:
    """Raise if the program keeps what parametrizations compute, and `module` has one.

    Raises:
        RecordError: What is kept would be a tensor of one rank.
    """
    if is_caching_parametrizations() and any(map(parametrize.is_parametrized, module.modules())):
        recorder.refuse(
            "a parametrized module is called in torch.nn.utils.parametrize.cached()",
            hint="call it outside of cached(): the parametrization is then computed at each call",
        )


def is_clear_around() -> bool:
    """Returns whether nothing is around that would keep a call from being recorded."""
    return transformation() is None and not dispatch_modes()


def refuse_trace() -> NoReturn:
    """A distributed model is called in `torch.jit.trace`, as by `torch.onnx.export(dynamo=False)`.

    Raises:
        RecordError: A trace sees operations as they run in one process.
    """
    raise RecordError(
        "a distributed model cannot be traced.",
        why=f"its operations are recorded, and run later by all ranks; at {format_where(find_where())}",
        hint="a plain one can: plain = Net(), plain.load_state_dict(model.state_dict()), torch.jit.trace(plain, x)",
    )


def check_around() -> None:
    """Raise if a call cannot be recorded for what is around it.

    Raises:
        WholeError: A dispatch mode or a transformation, which acts on data that are not here yet.
    """
    if is_nothing_around():
        return
    kind = transformation()
    if kind is not None:
        what, hint = _HINTS.get(kind, (f"torch.func ({kind}) over a distributed model", _HINTS["jvp"][1]))
        raise WholeError(f"{what} cannot be recorded.", why=f"at {format_where(find_where())}", hint=hint)
    for mode in dispatch_modes():
        raise WholeError(
            f"{type(mode).__name__} is on while a distributed model is called.",
            why=f"at {format_where(find_where())}",
            hint="it would see nothing: operations run later, and on several ranks. Use it inside a module, or on the\n"
            "model before farspan.distribute",
        )


_original_has = torch.overrides.has_torch_function


def install_around() -> None:
    """Let the ways into `torch.func` be seen, by which parameters may go to it before any recorded tensor does; and let
    modules find what they find in the plain program where they ask whether their tensors have overrides.

    Attention and `nn.TransformerEncoder` take a way of their own in evaluation where nothing has any: that gives other
    last bits, and zeros where the text is padded.
    """
    show_ways_into_func()
    torch.overrides.has_torch_function = _has_torch_function
    type(torch.autograd.Variable).__call__ = _make_variable  # type: ignore[method-assign]
    torch.jit.ScriptFunction.__call__ = _call_scripted  # type: ignore[method-assign]


def _has_torch_function(relevant_args: Any) -> bool:
    recorder = active.recorder
    if recorder is None or not recorder.is_recording:
        return _original_has(relevant_args)
    others = [each for each in relevant_args if type(each) is not LazyTensor and id(each) not in recorder.placed]
    with without_modes_of(recorder):
        return _original_has(others)


_original_make: Any = type(torch.autograd.Variable).__call__
_original_scripted: Any = torch.jit.ScriptFunction.__call__


def _make_variable(kind: type, *args: Any, **kwargs: Any) -> Any:
    """Replaces `torch.autograd.Variable(x)`, which no function mode sees: x, detached."""
    given = dict(zip(("data", "requires_grad"), args, strict=False)) | kwargs
    if not _concern_a_model([given.get("data")]):
        return _original_make(kind, *args, **kwargs)
    made = given["data"].detach()
    return made.requires_grad_() if given.get("requires_grad") else made


def _call_scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces the call of a scripted function: function modes see it where it is given recorded tensors, and not where
    it is given parameters alone, of which another rank may have the data.
    """
    tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)]
    if any(type(item) is LazyTensor for item in tensors) or not _concern_a_model(tensors):
        return _original_scripted(function, *args, **kwargs)
    return torch.overrides.handle_torch_function(function, tensors, *args, **kwargs)


def _concern_a_model(items: Iterable[Any]) -> bool:
    """Returns whether a recorded tensor, or a parameter or buffer of a distributed model, is among some objects, and a
    mode is to see them."""
    recorder = active.recorder
    if recorder is None or next(iter(function_modes()), None) is None:
        return False
    return any(type(item) is LazyTensor or id(item) in recorder.placed for item in items)
