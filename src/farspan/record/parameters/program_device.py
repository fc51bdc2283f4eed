"""The device on which the program has a parameter or buffer, whatever device its stage has it on.

`p.device` names it on every rank, and `model.to(device)` changes it: the data stay on the device of their stage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from farspan.call.infer.entry import intern
from farspan.devices import CPU, current_device, device_here, is_accelerator
from farspan.graph import Meta
from farspan.record.ops.explicit_placement import PLAIN_TO
from farspan.torch_private import DisableTorchFunction, make_wrapper, parse_to

if TYPE_CHECKING:
    from farspan.call.leaf import Placed
    from farspan.record.recording import Recording

__all__ = ["DEVICE_OF_ONE", "moving_in_program", "named_device"]

_ANSWERS: dict[Any, Callable[[torch.device], Any]] = {
    torch.Tensor.device.__get__: lambda device: device,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]  # its own name
    torch.Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    torch.Tensor.get_device: lambda device: -1 if device.index is None else device.index,
    torch.get_device: lambda device: -1 if device.index is None else device.index,
}

DEVICE_OF_ONE = frozenset(_ANSWERS)
"""Functions that ask on which device a tensor is."""

_KINDS = ("cpu", "cuda", "xpu", "mtia")  # of which torch.Tensor has a method in C++
_MOVES: dict[Any, str] = {PLAIN_TO: "", **{getattr(torch.Tensor, kind): kind for kind in _KINDS}}
"""Functions that may bring a tensor to another device, and of which type that is, where they alone say it."""


def named_device(placed: Placed, function: Any) -> Any:
    """Returns what a function of `DEVICE_OF_ONE` says of a parameter or buffer."""
    return _ANSWERS[function](placed.meta.device)


def moving_in_program(recorder_of: Callable[[nn.Module], Recording | None], apply: Any) -> Any:
    """Returns `nn.Module._apply` as it is to be: `model.to(device)`, `model.cuda()` say where the program has it."""

    @functools.wraps(apply)
    def apply_or_move(module: nn.Module, function: Any, recurse: bool = True) -> Any:
        recorder = None if isinstance(function, _Moves) else recorder_of(module)  # else of a child: see below
        if recorder is None or not recorder.is_recording:
            return apply(module, function, recurse)
        moves = _Moves(recorder, function)
        result = apply(module, moves, recurse)
        if moves.are_there:
            recorder.cache.forget_leaves()
            recorder.forget_states()
            recorder.forget_parameter_values()
            recorder.engine.settle_devices()
        return result

    return apply_or_move


class _Moves(TorchFunctionMode):
    """A function for `nn.Module._apply`, in which calls that change nothing of a parameter or buffer but its device
    say where the program has it."""

    def __init__(self, recorder: Recording, function: Any) -> None:
        super().__init__()
        self.are_there = False
        self._recorder = recorder
        self._function = function

    def __call__(self, tensor: Any) -> Any:
        with self:
            return self._function(tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        placed = self._recorder.placed.get(id(args[0])) if func in _MOVES else None
        device = None if placed is None else _device_given(func, args[1:], kwargs, placed.meta)
        if placed is None or device is None:
            return func(*args, **kwargs)
        if device != placed.meta.device:
            self._recorder.flush_before_change("a module is moved to another device")
            _move(placed, device)
            self.are_there = True
        return args[0]


def _move(placed: Placed, device: torch.device) -> None:
    meta = placed.meta
    placed.meta = intern(Meta(meta.shape, meta.stride, meta.dtype, device, meta.requires_grad, meta.is_parameter))
    if type(placed.tensor) is not placed.kind:  # a stub, which says it to torch, too
        with DisableTorchFunction():
            placed.tensor.data = make_wrapper(type(placed.tensor), placed.meta)


def _device_given(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], meta: Meta) -> torch.device | None:
    """Returns the device that a function of `_MOVES` names, if it changes nothing else and this process has it."""
    kind = _MOVES[function]
    if kind == "cpu":
        args = (kind, *args)
    elif kind:
        named, *others = args or (kwargs.get("device"),)
        args = (kind if named is None else torch.device(kind, named) if type(named) is int else named, *others)
        kwargs = {name: item for name, item in kwargs.items() if name != "device"}
    device, dtype, _, memory_format = parse_to(*args, **kwargs)
    if device is None or dtype not in (None, meta.dtype) or memory_format is not None:
        return None
    if device.type == "cpu":
        return CPU
    if not is_accelerator(device) or device_here(device) != device:
        return None
    return device if device.index is not None else current_device()
