"""The devices of this process, of whatever kind: through `torch.accelerator`, which knows CUDA, ROCm, XPU and others.

A process has at most one kind of accelerator, beside its CPU. To ask which of them is current takes hold of it; to ask
whether there are any, or of which type, does not.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Iterable, Sequence
from typing import Any

import psutil
import torch

__all__ = [
    "CPU",
    "accelerators",
    "current_device",
    "default_generators",
    "device_here",
    "device_types",
    "generators_of",
    "get_generator_state",
    "has_accelerator",
    "ids_of_accelerators",
    "is_accelerator",
    "is_in_use",
    "memory_bytes",
    "name_of_device",
    "set_generator_state",
    "wait_for_current_stream",
]

CPU = torch.device("cpu")


def has_accelerator() -> bool:
    """Returns whether this process has an accelerator that can be used."""
    return torch.accelerator.is_available()


def is_accelerator(device: torch.device) -> bool:
    """Returns whether a device runs what is queued for it, beside the host."""
    return device.type not in ("cpu", "meta")


def device_types() -> tuple[str, ...]:
    """Returns the types of the devices of this process, as torch names them."""
    return ("cpu", _kind()) if has_accelerator() else ("cpu",)


def accelerators() -> list[torch.device]:
    """Returns the accelerators of this process, by index."""
    if not has_accelerator():
        return []
    return [torch.device(_kind(), index) for index in range(torch.accelerator.device_count())]


def ids_of_accelerators() -> tuple[str, ...]:
    """Returns which devices the accelerators of this process are, by index: names that no other device has, whatever
    processes call it."""
    return tuple([_id_of(device) for device in accelerators()])


def current_device() -> torch.device:
    """Returns where this process computes unless it is told otherwise: its current accelerator, if it has one."""
    return torch.device(_kind(), torch.accelerator.current_device_index()) if has_accelerator() else CPU


def device_here(named: torch.device) -> torch.device:
    """Returns a device that another rank may have named, if this process has such a one; else the CPU."""
    is_here = not is_accelerator(named) or (has_accelerator() and named.type == _kind() and _index(named) < _count())
    return named if is_here else CPU


def wait_for_current_stream() -> None:
    """Waits for what is queued on the current stream of the current device, and for no other stream.

    Another stream may hold a receive whose message this process has still to ask for.
    """
    if has_accelerator():
        torch.accelerator.current_stream().synchronize()


def name_of_device(device: torch.device) -> str:
    """Returns the kind of a device: "cpu", "NVIDIA H200"; where torch has no name for it, its type."""
    name_of = getattr(torch.get_device_module(device), "get_device_name", None) if is_accelerator(device) else None
    return device.type if name_of is None else name_of(device)


def memory_bytes(device: torch.device) -> int:
    """Returns the memory of a device; of the CPU that of the machine."""
    return torch.accelerator.get_memory_info(device)[1] if is_accelerator(device) else psutil.virtual_memory().total


def is_in_use() -> bool:
    """Returns whether this process has begun to use an accelerator: a fork of it could not."""
    module = _module()
    return module is not None and module.is_initialized()


def default_generators() -> Sequence[torch.Generator]:
    """Returns the random generators of the accelerators, by index; none where none is in use."""
    return tuple(_module().default_generators) if is_in_use() else ()


def get_generator_state(device: torch.device) -> torch.Tensor:
    """Returns the state of the random generator of an accelerator."""
    return _module().get_rng_state(device)


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    """Sets the state of the random generator of an accelerator."""
    _module().set_rng_state(state, device)


def generators_of(tensors: Iterable[torch.Tensor]) -> Sequence[torch.Generator]:
    """Returns the generators that a call with these tensors may draw from: the CPU's, their devices', the current
    device's."""
    generators = default_generators()
    if not generators:
        return (torch.default_generator,)
    indices = {tensor.device.index for tensor in tensors if is_accelerator(tensor.device)}
    indices.add(torch.accelerator.current_device_index())
    return (torch.default_generator, *(generators[index] for index in sorted(indices)))


def _id_of(device: torch.device) -> str:
    module = torch.get_device_module(device)
    properties_of = getattr(module, "get_device_properties", None)
    uuid = None if properties_of is None else getattr(properties_of(device), "uuid", None)
    return f"{socket.gethostname()} {device}" if uuid is None else str(uuid)


def _index(device: torch.device) -> int:
    return 0 if device.index is None else device.index


@functools.cache
def _count() -> int:
    return torch.accelerator.device_count()


def _kind() -> str:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return accelerator.type


@functools.cache
def _module() -> Any:
    """`torch.cuda`, `torch.xpu`, ...: what `torch.accelerator` has no word for. None in a build for CPUs alone."""
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else torch.get_device_module(accelerator)
