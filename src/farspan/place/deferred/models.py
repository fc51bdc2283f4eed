"""Models that were built without data, as `distribute` gets them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import nn

from farspan.launch.raised.tracebacks import cut_frames
from farspan.place.deferred.construction import CONSTRUCTION
from farspan.place.deferred.guard import guard_all, unguarded
from farspan.torch_private import tree_leaves

__all__ = ["Offered", "digest_of", "fill_all", "fill_tensor", "guarded_on_error", "open_model"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def guarded_on_error(function: _Function) -> _Function:
    """`function`, after whose failure uses of tensors without data are noticed again."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            guard_all()
            cut_frames(error)
            raise

    return cast("_Function", call)


def open_model(model: nn.Module) -> None:
    """Let the tensors of `model` that have no data be plain tensors, which nothing may read before they are filled."""
    for tensor in _tensors_of(model) if CONSTRUCTION else ():
        unguarded(tensor)


def digest_of(tensor: torch.Tensor) -> int | None:
    """Returns a number that is equal for tensors without data that will hold the same; None for one that has data."""
    view = CONSTRUCTION.view_of(tensor)
    if view is None:
        return None
    return int.from_bytes(hashlib.blake2b(repr(view).encode(), digest_size=4).digest(), "big")


def fill_tensor(tensor: torch.Tensor) -> None:
    """Let a tensor have its data."""
    memory = CONSTRUCTION.memory_of(tensor)
    if memory is not None:
        CONSTRUCTION.fill(memory)


def fill_all(model: nn.Module) -> None:
    """Let all that `model` holds here have its data; memory that nobody uses any more is forgotten."""
    if CONSTRUCTION:
        for tensor in _tensors_of(model):
            fill_tensor(tensor)
        CONSTRUCTION.end()


class Offered(Mapping[str, torch.Tensor]):
    """Tensors by name, made when they are asked for."""

    def __init__(self, items: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._items = dict(items)

    def __getitem__(self, name: str) -> torch.Tensor:
        view = CONSTRUCTION.view_of(self._items[name])
        return self._items[name] if view is None else CONSTRUCTION.contents([view])[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def _tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Returns parameters, their gradients, buffers and whatever else its modules hold."""
    found: dict[int, torch.Tensor] = {id(item): item for item in chain(model.parameters(), model.buffers())}
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                items: list[Any] = tree_leaves(value) if type(value) in (list, tuple, dict) else [value]
                found.update({id(item): item for item in items if isinstance(item, torch.Tensor)})
    gradients = [item.grad for item in found.values() if item.is_leaf and item.grad is not None]
    return [*found.values(), *gradients]
