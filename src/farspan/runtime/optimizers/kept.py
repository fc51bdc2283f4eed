"""What an optimizer keeps in its state, its groups and its attributes: in a step, and outside of it.

    in a step     own tensors on the rank that has them, recorded tensors without data on the others (`step_view`)
    outside       recorded tensors on every rank, so that all do the same with them

It is turned into the one when a step begins, and into the other when the program asks for `optimizer.state`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from farspan.graph import Meta, Value
from farspan.lazy import LazyTensor, Placed, intern, meta_of
from farspan.lazy.ops.special import read_data
from farspan.runtime.optimizers.step_view import is_own, make_own

if TYPE_CHECKING:
    from farspan.runtime.engine import Engine

__all__ = [
    "change_tensors",
    "find_kept",
    "kept_for",
    "lose_parameter",
    "raw_state",
    "read_kept",
    "show_to_all",
    "show_to_step",
]

_Change = Callable[[torch.Tensor], Any]
_NUMBERS = frozenset([bool, int, float, str, type(None)])


def raw_state(optimizer: Optimizer) -> Any:
    """`optimizer.state` as it is now; empty for one that shows another's."""
    return vars(optimizer).get("state", {})


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


def _is_plain_object(item: Any) -> bool:
    """Whether it is of a class written in Python whose attributes are what it holds."""
    kind = type(item)
    is_python = bool(kind.__flags__ & (1 << 9)) and hasattr(item, "__dict__")  # a heap type
    return is_python and not isinstance(item, (type, nn.Module, Optimizer, LRScheduler))


def _parts(optimizer: Optimizer, placed: Mapping[int, Placed]) -> Iterator[tuple[str, Placed | None, _Part]]:
    """All places where it keeps tensors, each with a name that is the same on every rank."""
    state = raw_state(optimizer)
    for number, key in enumerate(state):
        item = placed.get(id(key))
        yield item.name if item is not None else f"state {number}", item, _Part(state, [key])
    for number, group in enumerate(optimizer.param_groups):
        yield f"group {number}", None, _Part(group, [name for name in group if name != "params"])
    attributes = vars(optimizer)
    names = [name for name in attributes if name not in ("state", "param_groups", "defaults") and "hooks" not in name]
    yield "attributes", None, _Part(attributes, names)


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


def show_to_step(engine: Engine, optimizer: Optimizer) -> None:
    """A step begins: own tensors are plain, and what is known to all is."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not LazyTensor:
            return tensor
        value = tensor._value
        is_recorded = value.call is not None or value.index > 0
        if is_recorded and value.meta.numel == 1:
            return engine.read(value)
        if engine.stages[value.stage].rank == engine.rank:
            return make_own(engine.read(value))
        return LazyTensor.make(Value(value.meta, value.stage), engine.recorder)

    for _, _, part in _parts(optimizer, engine.recorder.placed):
        part.change(change)


def show_to_all(engine: Engine, optimizer: Optimizer, number: int) -> None:
    """The program asks for the state of the `number`-th optimizer: the same recorded tensors everywhere."""
    first_stage = {stage.rank: index for index, stage in reversed(list(enumerate(engine.stages)))}
    for name, item, part in _parts(optimizer, engine.recorder.placed):
        place = -1

        def change(tensor: torch.Tensor, name: str = name, item: Placed | None = item) -> torch.Tensor:
            nonlocal place
            place += 1
            if type(tensor) is LazyTensor:
                value = tensor._value
                rank = engine.stages[value.stage].rank
                if rank == engine.rank or value.call is not None or value.index > 0:
                    return tensor
                meta, data = value.meta, None
            elif is_own(tensor):
                meta, data, rank = meta_of(tensor.detach()), tensor, engine.rank
            else:
                return tensor
            stage = first_stage[rank]
            if item is not None and engine.stages[item.stage].rank == rank:
                stage = item.stage
            shown = Value(intern(meta), stage)
            shown.state_of = (number, name, place)
            shown.data = data
            return LazyTensor.make(shown, engine.recorder)

        part.change(change)


def find_kept(
    optimizer: Optimizer, placed: Mapping[int, Placed], name: str, places: Sequence[int]
) -> list[torch.Tensor | None]:
    """Of the tensors that it keeps under `name`, those at `places`, as their rank has them (called in any thread)."""
    found: list[Any] = []
    for other, _, part in _parts(optimizer, placed):
        if other == name:
            part.change(lambda tensor: found.append(tensor) or tensor)
            break
    kept = [found[place] if place < len(found) else None for place in places]
    return [tensor._value.data if type(tensor) is LazyTensor else tensor for tensor in kept]


def read_kept(engine: Engine, state: Any) -> Any:
    """A copy of what an optimizer keeps for one parameter, with the data of recorded tensors: one question at most."""
    known: dict[int, Any] = {}
    asked: dict[tuple[int, int, str], list[LazyTensor]] = {}

    def ask(tensor: torch.Tensor) -> torch.Tensor:
        key = tensor._value.state_of if type(tensor) is LazyTensor and tensor._value.data is None else None
        if type(tensor) is LazyTensor and key is not None:
            asked.setdefault((engine.stages[tensor._value.stage].rank, key[0], key[1]), []).append(tensor)
        else:
            known[id(tensor)] = read_data(tensor)
        return tensor

    change_tensors(state, ask)
    for (rank, number, name), tensors in asked.items():
        places = [tensor._value.state_of[2] for tensor in tensors if tensor._value.state_of is not None]
        known.update(zip(map(id, tensors), engine.values.pull_kept(rank, number, name, places), strict=True))
    return copy.deepcopy(state, known)


# Parameters that are loaded, or go to another rank.


def kept_for(engine: Engine, item: Placed, state: Any, given: Any) -> Any:
    """Let what was loaded for a parameter be kept by its owner alone, but for what is no larger than a number.

    Args:
        engine: This rank's.
        item: The parameter.
        state: What the optimizer has made of what it was given.
        given: What it was given: with the memory of whole tensors, which `state` may not have here.
    """
    layouts: list[tuple[int, ...]] = []
    change_tensors(given, lambda tensor: layouts.append(tensor.stride()) or tensor)
    places = iter(layouts)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        stride = next(places)
        if tensor.dim() == 0 or tensor.numel() > item.meta.numel or type(tensor) is LazyTensor:
            return tensor
        if item.is_owned:
            return make_own(tensor)
        meta = Meta(tuple(tensor.shape), stride, tensor.dtype, tensor.device, False)
        return LazyTensor.make(Value(intern(meta), item.stage), engine.recorder)

    return change_tensors(state, change)


def lose_parameter(engine: Engine, item: Placed, state: Any, pulled: Any) -> Any:
    """A parameter has been given to another stage: what was kept for it before, as this rank sees it now.

    Args:
        state: What this rank kept.
        pulled: The same with the old owner's data, if this rank is the new owner.
    """
    coming: list[torch.Tensor] = []
    if pulled is not None:
        change_tensors(pulled, lambda tensor: coming.append(tensor) or tensor)
    place = -1

    def change(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal place
        place += 1
        if type(tensor) is not LazyTensor and not is_own(tensor):
            return tensor
        if item.is_owned:
            return make_own(coming[place]) if pulled is not None else tensor
        meta = tensor._value.meta if type(tensor) is LazyTensor else meta_of(tensor.detach())
        return LazyTensor.make(Value(meta, item.stage), engine.recorder)

    return change_tensors(state, change)
