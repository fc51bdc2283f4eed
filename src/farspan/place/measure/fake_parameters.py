"""Models without their weights: parameters that know shape and dtype and hold no data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from farspan.torch_private import FakeTensorMode, is_fake, put_module_apply

__all__ = ["with_fake_parameters"]


@contextmanager
def with_fake_parameters(mode: FakeTensorMode) -> Iterator[None]:
    """Let every parameter that a module gets in the body be a fake of it: a model takes the memory of one at a time."""
    register: Any = nn.Module.register_parameter
    moved: dict[int, tuple[Any, Any]] = {}
    """Parameters by id: each itself, and what it has become. So tied ones stay tied."""

    def register_hollow(module: nn.Module, name: str, parameter: Any) -> None:
        if isinstance(parameter, torch.Tensor) and not is_fake(parameter) and not is_lazy(parameter):
            parameter = _fake(parameter, mode)
        register(module, name, parameter)

    def apply_hollow(module: nn.Module, function: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        """`module.to(...)`: torch swaps the inside of parameters in place, which it cannot for fakes."""
        if recurse:
            for child in module.children():
                child._apply(function)
        table: Any = module._parameters
        fakes = {name: item for name, item in table.items() if item is not None and is_fake(item)}
        table.update(dict.fromkeys(fakes))
        apply(module, function, recurse=False)
        for name, item in fakes.items():
            if id(item) not in moved:
                moved[id(item)] = (item, _fake(function(item.detach()), mode, item.requires_grad))
            table[name] = moved[id(item)][1]
        return module

    nn.Module.register_parameter = register_hollow  # type: ignore[method-assign]
    apply = put_module_apply(apply_hollow)
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        put_module_apply(apply)


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, requires_grad: bool | None = None) -> nn.Parameter:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return nn.Parameter(fake, tensor.requires_grad if requires_grad is None else requires_grad)
