"""Checks that a model can be distributed: all its weights are there, and its code is Python."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from farspan.errors import PlanError
from farspan.place.deferred.context import deferred_init

__all__ = ["built_model", "check_model"]

_Model = TypeVar("_Model", bound=nn.Module)


def check_model(model: nn.Module) -> None:
    """Raise if the calls of a model could not be recorded; before the ranks exchange anything about it.

    Raises:
        PlanError: A parameter or buffer has no shape yet, or a module with weights is scripted or traced.
    """
    for name, item in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(item):
            raise PlanError(
                f"the {'parameter' if isinstance(item, nn.Parameter) else 'buffer'} '{name}' has no shape yet.",
                why="it belongs to a lazy module, which learns its shape in its first forward.",
                hint="run the model once on an example before farspan.distribute(model)",
            )
        if item.is_meta:
            raise PlanError(
                f"the {'parameter' if isinstance(item, nn.Parameter) else 'buffer'} '{name}' has no data.",
                why="it is on the meta device, which keeps shapes alone: what was written there is lost.",
                hint="with farspan.deferred_init():  # each process makes just what it owns\n"
                '    model = Net(config)  # or Net.from_pretrained(folder); without torch.device("meta")',
            )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and _has_weights(module):
            raise PlanError(
                f"{f'the module {name!r}' if name else 'the model'} is scripted or traced.",
                why="TorchScript keeps its weights where nothing can stand for them, and its code is no Python.",
                hint="distribute the module it was made of; script or trace a copy of that for export",
            )


def _has_weights(module: nn.Module) -> bool:
    return next(chain(module.parameters(), module.buffers()), None) is not None


def built_model(model: _Model | Callable[[], _Model]) -> _Model:
    """Returns the model itself, or what a function builds, without its data.

    Raises:
        PlanError: It is neither.
    """
    built: Any = model
    if callable(model) and not isinstance(model, nn.Module):
        with deferred_init():
            built = model()
    if not isinstance(built, nn.Module):
        raise PlanError(
            f"distribute takes a torch.nn.Module, not a {type(built).__name__}.",
            hint="model = farspan.distribute(model)",
        )
    return built  # type: ignore[return-value]
