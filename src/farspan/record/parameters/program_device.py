"""The device on which the program has a parameter or buffer, whatever device its stage has it on.

`p.device` names it on every rank, and `model.to(device)` changes it: the data stay on the device of their stage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from farspan.call.infer.entry import intern
from farspan.graph import Meta
from farspan.torch_private import DisableTorchFunction, make_wrapper

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


def named_device(placed: Placed, function: Any) -> Any:
    """Returns what a function of `DEVICE_OF_ONE` says of a parameter or buffer."""
    return _ANSWERS[function](placed.meta.device)


def moving_in_program(recorder_of: Callable[[nn.Module], Recording | None], apply: Any) -> Any:
    """Returns `nn.Module._apply` as it is to be: `model.to(device)`, `model.cuda()` say where the program has it."""

    @functools.wraps(apply)
    def apply_or_move(module: nn.Module, function: Any, recurse: bool = True) -> Any:
        recorder = recorder_of(module)
        if recorder is None or not recorder.is_recording:
            return apply(module, function, recurse)

        def applied(tensor: Any) -> Any:
            placed = recorder.placed.get(id(tensor))
            device = None if placed is None else _device_given(function, placed)
            if placed is None or device is None:
                return function(tensor)
            if device != placed.meta.device:
                recorder.flush_before_change("a module is moved to another device")
                _move(placed, device)
            return tensor

        before = {key: item.meta for key, item in recorder.placed.items()}
        result = apply(module, applied, recurse)
        if any(recorder.placed[key].meta is not meta for key, meta in before.items()):
            recorder.cache.forget_leaves()
            recorder.forget_states()
            recorder.forget_parameter_values()
            recorder.engine.settle_devices()
        return result

    return apply_or_move


def _move(placed: Placed, device: torch.device) -> None:
    meta = placed.meta
    placed.meta = intern(Meta(meta.shape, meta.stride, meta.dtype, device, meta.requires_grad, meta.is_parameter))
    if type(placed.tensor) is not placed.kind:  # a stub, which says it to torch, too
        with DisableTorchFunction():
            placed.tensor.data = make_wrapper(type(placed.tensor), placed.meta)


def _device_given(function: Any, placed: Placed) -> torch.device | None:
    """Returns the device to which a function moves tensors, if that is all it does."""
    probe = torch.empty(1, dtype=placed.meta.dtype)
    given = function(probe)
    if type(given) is not torch.Tensor or given.device.type == "meta":
        return None
    if (given.dtype, given.shape, given.stride()) != (probe.dtype, probe.shape, probe.stride()):
        return None
    return given.device if given is not probe or placed.meta.device == probe.device else None
