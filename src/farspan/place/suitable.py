"""Checks that a model can be distributed: all its weights are there, its code is Python, and nothing else has it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, product
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

__all__ = ["built_model", "check_buffers", "check_is_new", "check_memory", "check_model"]

_IsApart = Callable[[str, str], bool]
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
    for items in _by_memory(model.named_parameters()).values():
        if (found := _in_one_place(items)) is not None:
            one, other = found
            raise PlanError(
                f"the parameters {one} and {other} are one memory.",
                why="they are two parameters, each with a gradient and an owner of its own; what one rank writes "
                "into the one would not be in the other.",
                hint=f"before farspan.distribute(model), let them be one parameter (one.weight = other.weight), or "
                f"give one of them memory of its own: {other}.data = {other}.data.clone()",
            )


def check_buffers(model: nn.Module, buffers: Iterable[tuple[str, torch.Tensor]], is_apart: _IsApart) -> None:
    """Raise if an element of memory is in a parameter, and in a buffer that another rank has.

    Args:
        model: It has not been placed.
        buffers: Those that are placed, by name.
        is_apart: Whether what is written into a parameter is not in a buffer's memory then, by their names.

    Raises:
        PlanError: It is.
    """
    parameters = _by_memory(model.named_parameters())
    for memory, items in _by_memory(buffers).items():
        for parameter, buffer in product(parameters.get(memory, ()), items):
            if _in_one_place([parameter, buffer]) is not None and is_apart(parameter[0], buffer[0]):
                raise PlanError(
                    f"the parameter {parameter[0]} and the buffer {buffer[0]} are one memory.",
                    why="different ranks have them, or slices of them: a step would not change both.",
                    hint="use the parameter in the place of the buffer: self.weight.detach(); or give the buffer\n"
                    "memory of its own: self.register_buffer(name, self.weight.detach().clone())",
                )


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


def _by_memory(named: Iterable[tuple[str, torch.Tensor]]) -> dict[int, list[tuple[str, torch.Tensor]]]:
    """Returns plain tensors by the memory in which they lie."""
    found: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, item in named:
        if item.layout is torch.strided and not is_fake(item) and not is_wrapped(item):
            found.setdefault(item.untyped_storage()._cdata, []).append((name, item))
    return found


def _in_one_place(items: Sequence[tuple[str, torch.Tensor]]) -> tuple[str, str] | None:
    """Returns the names of two tensors of one memory that have an element in common, if there are two."""
    extents = sorted([(*_extent(item), number) for number, (_, item) in enumerate(items) if item.numel()])
    for place, (_, end, number) in enumerate(extents):
        for begin, _, later in extents[place + 1 :]:
            if begin >= end:
                break
            if _overlap(items[number][1], items[later][1]):
                first, second = sorted([number, later])
                return items[first][0], items[second][0]
    return None


def _extent(item: torch.Tensor) -> tuple[int, int]:
    """Returns the first byte of a tensor in its memory, and the one behind its last."""
    begin = int(item.storage_offset())
    last = sum([(int(size) - 1) * int(stride) for size, stride in zip(item.shape, item.stride(), strict=True)])
    return begin * item.element_size(), (begin + last + 1) * item.element_size()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors of one memory, of which the extents overlap, have an element in common."""
    extents = [_extent(item) for item in (one, other)]
    if all(end - begin == item.nbytes for item, (begin, end) in zip((one, other), extents, strict=True)):
        return True
    first = min(begin for begin, _ in extents)
    taken = torch.zeros(max(end for _, end in extents) - first, dtype=torch.bool)
    parts = [
        taken.as_strided(item.shape, [stride * item.element_size() for stride in item.stride()], begin - first)
        for item, (begin, _) in zip((one, other), extents, strict=True)
    ]
    parts[0].fill_(True)
    return bool(parts[1].any())


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
