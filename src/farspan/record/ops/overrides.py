"""torch functions that are answered in their own way instead of being recorded as a call.

A handler takes (recorder, function, args, kwargs); NotImplemented means: record it like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.derivative import FunctionDerivative
from farspan.call.draws.drawing_functions import has_own_generator
from farspan.call.function_call import FunctionCall
from farspan.call.infer.entry import Entry
from farspan.call.naming import READERS, REFUSED, RUNNING_STATISTICS, name_of
from farspan.call.pytree.template import flatten_arguments, map_tensors, rebuild
from farspan.record.memory.memory_addresses import ADDRESSES
from farspan.record.memory.rebinding import data_of, set_data
from farspan.record.ops.explicit_placement import PLAIN_TO, to
from farspan.record.ops.views import Through, reshape
from farspan.record.parameters.parameter_hooks import HOOKS, register
from farspan.record.parameters.requested_gradients import record_grad
from farspan.record.parameters.scaling import SCALING
from farspan.record.tensor import LazyTensor, StubParameter
from farspan.torch_private import has_compatible_type

if TYPE_CHECKING:
    from farspan.record.recording import Recording

__all__ = ["HANDLERS", "NUMBERS", "draw_here", "is_own_draw", "read_data", "read_numbers", "read_recorded"]

Handler = Callable[["Recording", Any, tuple[Any, ...], dict[str, Any]], Any]
_T: Any = torch.Tensor
_LIKE = frozenset([torch.rand_like, torch.randn_like, torch.randint_like])
NUMBERS = ("alpha", "beta", "value")
"""Arguments for which torch takes numbers only."""
_SAME: dict[str, str] = {"gradient": "gradients", "grad_tensors": "gradients", "grad_variables": "gradients"}


def read_data(tensor: Any) -> Any:
    """Returns the plain tensor behind a recorded one, fetched from its owner."""
    return tensor.read() if type(tensor) in (LazyTensor, StubParameter) else tensor


def read_recorded(state: Any) -> Any:
    """`state`, with the data of recorded tensors in their place."""
    return map_tensors(state, read_data)


def read_numbers(kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs` with numbers in the place of recorded tensors where torch takes numbers only, and reads what it gets."""
    if not kwargs or LazyTensor not in [type(kwargs.get(name)) for name in NUMBERS]:
        return kwargs
    return {name: item.item() if name in NUMBERS and torch.is_tensor(item) else item for name, item in kwargs.items()}


def is_own_draw(
    recorder: Recording, function: Any, entry: Entry, tensors: Sequence[torch.Tensor], kwargs: dict[str, Any]
) -> bool:
    """Returns whether random numbers are the program's own: a new tensor, made outside every module
    (`torch.multinomial` on a model's logits), or whatever it draws with a generator of its own. Every rank draws them,
    as one process does. Not where a gradient would get lost.
    """
    has_own = has_own_generator(kwargs)
    if recorder.frame is not recorder.root and not has_own:
        return False
    has_gradient = any(meta.requires_grad for meta in entry.metas)
    is_new = not entry.mutated or (has_own and all(type(tensors[number]) is LazyTensor for number in entry.mutated))
    return type(function) not in (FunctionCall, FunctionDerivative, Through) and is_new and not has_gradient


def draw_here(recorder: Recording, function: Any, template: Any, tensors: Sequence[torch.Tensor], entry: Entry) -> Any:
    """Draw random numbers of `is_own_draw`, on this rank as on all."""
    data = [data_to_draw(function, tensor) for tensor in tensors]
    for number in entry.mutated:
        data[number] = data[number].clone()
    args, kwargs = rebuild(template, data)
    result = recorder.draws.now(function, args, kwargs)
    for number in entry.mutated:
        recorder.dispatch(torch.Tensor.copy_, (tensors[number], data[number]), {})
        result = tensors[number] if result is data[number] else result
    return result


def data_to_draw(function: Any, tensor: Any) -> Any:
    """Returns what a function of `is_own_draw` needs in place of `tensor`: its data, or only its shape."""
    if function in _LIKE and type(tensor) is LazyTensor:
        meta = tensor._value.meta
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
    return read_data(tensor)


def _backward(recorder: Recording, function: Any, args: Any, kwargs: dict[str, Any]) -> None:
    named: dict[str, Any] = {_SAME.get(name, name): value for name, value in kwargs.items()}
    recorder.backward(*args, **named)


def _read(recorder: Recording, function: Any, args: Any, kwargs: Any) -> Any:
    """Fetches the data that are asked for, and lets the function run on them."""

    def read(tensor: Any) -> Any:
        recorder.before_read(tensor)
        return read_data(tensor)

    args, kwargs = map_tensors((args, kwargs), read)
    return function(*args, **kwargs)


def _apply(recorder: Recording, function: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function of Python's for each element and writes what it gives: on every rank, as in one process."""
    read, kwargs = map_tensors((args, kwargs), read_data)
    data = read[0].detach().clone().requires_grad_(args[0].requires_grad)
    function(data, *read[1:], **kwargs)
    return recorder.dispatch(_T.copy_, (args[0], data), {})


def _like_another(recorder: Recording, function: Any, args: Any, kwargs: Any) -> Any:
    """Takes `x.view_as(other)`: of `other` the shape is all that counts."""
    given = args[0], (kwargs.get("other") if len(args) < 2 else args[1]).shape
    is_plain = type(args[0]) is torch.Tensor and id(args[0]) not in recorder.placed
    return _LIKE_ANOTHER[function](*given) if is_plain else recorder.dispatch(_LIKE_ANOTHER[function], given, {})


_LIKE_ANOTHER: dict[Any, Any] = {_T.view_as: _T.view, _T.reshape_as: _T.reshape, _T.expand_as: _T.expand}


def _refuse(recorder: Recording, function: Any, args: Any, kwargs: Any) -> Any:
    recorder.refuse(f"{name_of(function)} cannot take recorded tensors", hint=REFUSED[function])


def _normalise(recorder: Recording, function: Any, args: Any, kwargs: Any) -> Any:
    """Running statistics are plain tensors that the function writes without saying so in its schema."""
    if kwargs.get(RUNNING_STATISTICS[function]) and len(args) > 1 and args[1] is not None:
        recorder.refuse(
            f"{name_of(function)} keeps running statistics, and its module's parameters lie on several stages",
            hint="place the normalisation module as a whole on one stage",
        )
    return NotImplemented


def _is_of_compatible_type(recorder: Recording, function: Any, args: Any, kwargs: Any) -> bool:
    """`Module.to` asks whether it may set `param.data`."""
    return args[0].device.type == args[1].device.type


def _detach_in_place(recorder: Recording, function: Any, args: Any, kwargs: Any) -> Any:
    """`x.detach_()`: the tensor is from now on what `x.detach()` gives."""
    tensor = args[0]
    recorder.deferred.record_one(tensor)
    if type(tensor) is not LazyTensor or not tensor.requires_grad:
        return NotImplemented
    return reshape(recorder, _T.detach_, *flatten_arguments(args, kwargs), "detach_()")


HANDLERS: dict[Any, Handler] = {
    has_compatible_type: _is_of_compatible_type,
    torch.Tensor.backward: _backward,
    torch.autograd.backward: _backward,
    torch.autograd.grad: record_grad,
    **SCALING,
    **dict.fromkeys(READERS, _read),
    **dict.fromkeys(REFUSED, _refuse),
    **ADDRESSES,
    **dict.fromkeys(HOOKS, register),
    **dict.fromkeys(RUNNING_STATISTICS, _normalise),
    **dict.fromkeys([_T.apply_, _T.map_, _T.map2_], _apply),
    **dict.fromkeys(_LIKE_ANOTHER, _like_another),
    PLAIN_TO: to,
    _T.detach: data_of,
    _T.data.__get__: data_of,
    _T.data.__set__: set_data,
    **dict.fromkeys([_T.detach_, torch.detach_], _detach_in_place),
}
