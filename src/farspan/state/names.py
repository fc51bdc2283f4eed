"""Names the tensors of a program in a checkpoint: as the program calls them, whatever the plan.

    model/blocks.0.weight               of `model=model`
    model/generator/conv.weight         of `model={"generator": ..., "critic": ...}`
    optimizer/blocks.0.weight/exp_avg   what an optimizer keeps for a parameter of the model

A parameter that the model has under several names is stored under the first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from farspan.errors import CheckpointError
from farspan.execute.engine import Engine
from farspan.record.tensor import LazyTensor

__all__ = ["Named", "aliases_of", "check_key", "modules_in", "named_tensors", "parameter_names", "touch"]

Named = tuple[str, torch.Tensor]


def named_tensors(module: nn.Module) -> Iterator[Named]:
    """Yields all parameters, and the buffers that are saved, each once, by its first name."""
    seen: set[int] = set()
    for name, item in _all_tensors(module):
        if id(item) not in seen:
            seen.add(id(item))
            yield name, item


def touch(tensor: torch.Tensor) -> None:
    """Let a tensor of a class of its own see that its data are used: one that is not made before that is made now."""
    if type(tensor) not in (torch.Tensor, nn.Parameter, LazyTensor) and tensor.numel():
        with torch.no_grad():
            tensor.reshape(-1)[:1].clone()


def aliases_of(module: nn.Module) -> dict[str, str]:
    """Returns the other names of tensors that have several, each to the first one."""
    first: dict[int, str] = {}
    found = ((name, first.setdefault(id(item), name)) for name, item in _all_tensors(module))
    return {name: known for name, known in found if name != known}


def modules_in(value: Any, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields the models in what the program saves, with their paths."""
    if isinstance(value, nn.Module):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from modules_in(item, f"{path}/{key}")


def parameter_names(engine: Engine, objects: Mapping[str, Any]) -> dict[int, str]:
    """Maps parameters, by id, to their names in the state of optimizers: as in the one model, or with its path before
    it.

    Args:
        engine: This rank's.
        objects: All that the program saves or loads.
    """
    names = {key: f"placed/{item.name}" for key, item in engine.recorder.placed.items() if item.is_parameter}
    own: dict[int, str] = {}
    for path, module in modules_in(dict(objects), ""):
        prefix = path.removeprefix("/model").lstrip("/")
        for name, parameter in module.named_parameters():
            own.setdefault(id(parameter), f"{prefix}/{name}" if prefix else name)
    return names | own


def check_key(key: Any, path: str) -> str:
    """Returns a name that the program gives to what it saves.

    Raises:
        CheckpointError: It is none.
    """
    if type(key) is not str or not key or "/" in key or not key.isprintable():
        raise CheckpointError(
            f"{path} has the key {key!r:.60}.", why="names of what is saved are texts without '/'.", hint='"ema"'
        )
    return key


def _all_tensors(module: nn.Module) -> Iterator[Named]:
    yield from module.named_parameters(remove_duplicate=False)
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
