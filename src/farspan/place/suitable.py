"""Checks that a model can be distributed: all its weights are there, its code is Python, and nothing else has it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from farspan.errors import PlanError
from farspan.execute.engine import Engine
from farspan.place.deferred.context import deferred_init
from farspan.record.parameters.copying import plan_by_model
from farspan.torch_private import is_fake, is_wrapped

__all__ = ["built_model", "check_is_new", "check_memory", "check_model"]

_Model = TypeVar("_Model", bound=nn.Module)


def check_model(model: nn.Module) -> None:
    """Raise if the calls of a model could not be recorded; before the ranks exchange anything about it.

    Raises:
        PlanError: It has been distributed; a parameter or buffer has no shape yet; or a module with weights is scripted
            or traced.
    """
    if model in plan_by_model:
        raise PlanError(
            "this model has been distributed already.",
            why="its modules and parameters have their places.",
            hint="call farspan.distribute(model) once; another plan is for another model",
        )
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


def check_memory(model: nn.Module) -> None:
    """Raise if an element of memory is in two parameters, which different ranks would own.

    Raises:
        PlanError: It is.
    """
    by_memory: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, item in model.named_parameters():
        if item.layout is torch.strided and not is_fake(item) and not is_wrapped(item):
            by_memory.setdefault(item.untyped_storage()._cdata, []).append((name, item))
    for items in by_memory.values():
        if len(items) == 1:
            continue
        owner = torch.full((items[0][1].untyped_storage().nbytes(),), -1, dtype=torch.int32)
        for number, (name, item) in enumerate(items):
            size_bytes, begin = item.element_size(), item.storage_offset() * item.element_size()
            strides = [stride * size_bytes for stride in item.stride()]
            part = owner.as_strided(item.shape, strides, begin)
            other = int(part.max()) if part.numel() else -1
            if other >= 0:
                raise PlanError(
                    f"the parameters {items[other][0]} and {name} are one memory.",
                    why="they are two parameters, each with a gradient and an owner of its own; what one rank writes "
                    "into the one would not be in the other.",
                    hint=f"before farspan.distribute(model), let them be one parameter (one.weight = other.weight), or "
                    f"give one of them memory of its own: {name}.data = {name}.data.clone()",
                )
            part.fill_(number)


def check_is_new(engine: Engine, model: nn.Module) -> None:
    """Raise if other things divide a model among the ranks too; from now on DistributedDataParallel raises for it.

    Raises:
        PlanError: A part of it has been distributed, or it has a module of torch's DistributedDataParallel.
    """
    if engine.num_ranks == 1:
        return
    for name, parameter in model.named_parameters():
        placed = engine.recorder.placed.get(id(parameter))
        if placed is not None and placed.tensor is parameter:
            raise PlanError(
                f"the parameter '{name}' is of a model that has been distributed already.",
                why="it has its place there, and a parameter has one.",
                hint="call farspan.distribute once, for the module around all of them",
            )
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise _wrapped("the model is in DistributedDataParallel.")
    _refuse_wrapping()


def _wrapped(what: str) -> PlanError:
    return PlanError(
        what,
        why="that averages the gradients of processes which have the whole model each; these ranks have parts of one.",
        hint="leave it and init_process_group out; farspan.distribute(model, data_parallel=2) averages over two groups",
    )


@functools.cache
def _refuse_wrapping() -> None:
    make = DistributedDataParallel.__init__

    @functools.wraps(make)
    def checked(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if any(each in plan_by_model for each in module.modules()):
            raise _wrapped("a distributed model is given to DistributedDataParallel.")
        make(self, module, *args, **kwargs)

    DistributedDataParallel.__init__ = checked


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
            why="the modules of one model are what the ranks divide among them.",
            hint="model = farspan.distribute(model)",
        )
    return built  # type: ignore[return-value]
