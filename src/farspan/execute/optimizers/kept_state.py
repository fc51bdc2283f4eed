"""The tensors that an optimizer keeps in its state, its groups and its attributes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from farspan.call.leaf import Placed
from farspan.execute.optimizers.lent_state import state_in
from farspan.record.tensor import LazyTensor

__all__ = ["change_tensors", "find_kept", "parts_beside_state", "parts_of", "parts_of_state", "raw_state", "tensors_in"]

_Change = Callable[[torch.Tensor], Any]
_NUMBERS = frozenset([bool, int, float, str, type(None)])


def raw_state(optimizer: Optimizer) -> Any:
    """`optimizer.state` as it is now; empty for one that shows another's."""
    attributes = vars(optimizer)
    return state_in(attributes) if "state" in attributes else {}


def change_tensors(item: Any, change: _Change, seen: set[int] | None = None) -> Any:
    """Put `change(tensor)` in the place of each tensor in lists, dictionaries and plain objects, in their order.

    Returns:
        The item, which is another one only if it is a tensor or a tuple.
    """
    if isinstance(item, torch.Tensor):
        return change(item)
    if type(item) in _NUMBERS:
        return item
    seen = set() if seen is None else seen
    if id(item) in seen:
        return item
    seen.add(id(item))
    if isinstance(item, (list, deque, dict)):
        for key, value in item.items() if isinstance(item, dict) else enumerate(item):
            new = change_tensors(value, change, seen)
            if new is not value:
                item[key] = new
    elif isinstance(item, tuple):
        values = [change_tensors(value, change, seen) for value in item]
        if any(new is not value for new, value in zip(values, item, strict=True)):
            return type(item)(*values) if hasattr(item, "_fields") else tuple(values)
    elif _is_plain_object(item):
        change_tensors(vars(item), change, seen)
    return item


def tensors_in(item: Any) -> list[Any]:
    """Returns the tensors that `change_tensors` finds, in its order."""
    found: list[Any] = []
    change_tensors(item, lambda tensor: found.append(tensor) or tensor)
    return found


def _is_plain_object(item: Any) -> bool:
    """Returns whether it is of a class written in Python whose attributes are what it holds."""
    kind = type(item)
    is_python = bool(kind.__flags__ & (1 << 9)) and hasattr(item, "__dict__")  # a heap type
    return is_python and not isinstance(item, (type, nn.Module, Optimizer, LRScheduler))


def parts_of(optimizer: Optimizer, placed: Mapping[int, Placed]) -> Iterator[tuple[str, Placed | None, _Part]]:
    """Returns all places where it keeps tensors, each with a name that is the same on every rank."""
    yield from parts_of_state(optimizer, placed)
    for name, part in parts_beside_state(optimizer):
        yield name, None, part


def parts_of_state(optimizer: Optimizer, placed: Mapping[int, Placed]) -> Iterator[tuple[str, Placed | None, _Part]]:
    """Yields the places of its state, one for each parameter."""
    state = raw_state(optimizer)
    for number, key in enumerate(state):
        item = placed.get(id(key))
        yield item.name if item is not None else f"state {number}", item, _Part(state, [key])


def parts_beside_state(optimizer: Optimizer) -> Iterator[tuple[str, _Part]]:
    """Yields the places other than its state where it keeps tensors: its groups, and its attributes."""
    for number, group in enumerate(optimizer.param_groups):
        yield f"group {number}", _Part(group, [name for name in group if name != "params"])
    attributes = vars(optimizer)
    names = [name for name in attributes if name not in ("state", "param_groups", "defaults") and "hooks" not in name]
    yield "attributes", _Part(attributes, names)


class _Part:
    """Some entries of a dictionary."""

    def __init__(self, holder: Any, keys: list[Any]) -> None:
        self.holder = holder
        self.keys = keys

    def change(self, change: _Change) -> None:
        for key in self.keys:
            value = self.holder[key]
            new = change_tensors(value, change)
            if new is not value:
                self.holder[key] = new


def find_kept(
    optimizer: Optimizer, placed: Mapping[int, Placed], name: str, places: Sequence[int]
) -> list[torch.Tensor | None]:
    """Returns, of the tensors that it keeps under `name`, those at `places`, as their rank has them. May be called in
    any thread."""
    found: list[Any] = []
    for other, _, part in parts_of(optimizer, placed):
        if other == name:
            part.change(lambda tensor: found.append(tensor) or tensor)
            break
    kept = [found[place] if place < len(found) else None for place in places]
    return [tensor._value.data if type(tensor) is LazyTensor else tensor for tensor in kept]
