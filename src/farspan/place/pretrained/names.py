"""Matches the tensors of a saved model with those of this one, by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from farspan.errors import CheckpointError
from farspan.place.pretrained.stored import Stored

__all__ = ["Matched", "match"]

_MOST_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """The result of matching a saved model with this one.

    Attributes:
        found: For each tensor of the model its name and what is stored for it.
        missing: Names of those that nothing is stored for.
        unexpected: Names of what is stored for nothing.
    """

    found: tuple[tuple[str, torch.Tensor, Stored], ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def said_of(self, model: nn.Module, path: object) -> str:
        """Returns what the user should know; nothing if all is there."""
        lines: list[str] = []
        if self.missing:
            lines.append(
                f"farspan: {path} does not have {_shown(self.missing)} of {type(model).__name__}; "
                "what the constructor has given them stays."
            )
        if self.unexpected:
            lines.append(f"farspan: {path} has {_shown(self.unexpected)}, which {type(model).__name__} does not have.")
        return "\n".join(lines)


def match(model: nn.Module, stored: Mapping[str, Stored]) -> Matched:
    """Find what is stored for each parameter and persistent buffer of `model`.

    As transformers does it: one of the names of a tied parameter will do; the prefix of the base model may be there or
    not; and what the class says may be missing or unexpected is neither.

    Raises:
        CheckpointError: A tensor has another shape than the model's.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in _state(model):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    prefix: Any = getattr(model, "base_model_prefix", "")
    used: set[str] = set()
    found: list[tuple[str, torch.Tensor, Stored]] = []
    missing: list[str] = []
    for key, its_names in names.items():
        candidates = [each for name in its_names for each in _spellings(name, prefix) if each in stored]
        used.update(candidates)
        if candidates:
            found.append((its_names[0], tensors[key], stored[candidates[0]]))
        else:
            missing.append(its_names[0])
    for name, tensor, item in found:
        if tuple(tensor.shape) != item.shape:
            raise CheckpointError(
                f"{name} of the model is {list(tensor.shape)}, and {item.name} in {item.path} is {list(item.shape)}.",
                why="the model was saved with another configuration.",
                hint="build the model with the configuration that lies beside the file",
            )
    return Matched(
        found=tuple(found),
        missing=_not_ignored(missing, getattr(model, "_keys_to_ignore_on_load_missing", None)),
        unexpected=_not_ignored(
            (name for name in stored if name not in used), getattr(model, "_keys_to_ignore_on_load_unexpected", None)
        ),
    )


def _state(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Yields what a state dictionary of `model` holds, each under all its names."""
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _spellings(name: str, prefix: str) -> list[str]:
    """Returns the names under which a tensor may be stored that the model calls `name`.

    >>> _spellings("bert.pooler.weight", "bert"), _spellings("pooler.weight", "bert"), _spellings("weight", "")
    (['bert.pooler.weight', 'pooler.weight'], ['pooler.weight', 'bert.pooler.weight'], ['weight'])
    """
    if not prefix:
        return [name]
    is_below = name.startswith(f"{prefix}.")
    return [name, name.removeprefix(f"{prefix}.") if is_below else f"{prefix}.{name}"]


def _not_ignored(names: Iterable[str], patterns: Any) -> tuple[str, ...]:
    return tuple(name for name in names if not any(re.search(each, name) for each in patterns or ()))


def _shown(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(names[:_MOST_SHOWN]) + more
