"""Reads the tables of a leaf's modules (parameters, buffers, parts), for calls that find something else there.

`torch.func.functional_call`, `module._parameters[name] = ...`, `module.fc = nn.Linear(...)`, pruning and the like put
other things into the tables. A call of a leaf sees what is there when it is recorded:

    what the plan has placed      runs with the leaf, as ever
    any other tensor              becomes one more argument of the call: gradients flow to it

It may run much later, when the tables hold something else again: `holding` puts back what the call saw.
Whether somebody has hooked a module, which is in tables too, is asked here; `user_hooks` calls the hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from farspan.torch_private import are_all_modules_hooked, has_full_backward_hooks

__all__ = ["Slot", "Tables", "has_user_hooks", "is_of_torch"]

_NAMES = ("_parameters", "_buffers", "_modules")
_of = itemgetter(*_NAMES)
_attributes = attrgetter("__dict__")


class Slot(NamedTuple):
    """A place in a table whose tensor is not the leaf's own."""

    table: int
    """Number of the table, counted over all modules."""
    name: str
    number: int
    """Number of the tensor, among those that the slots hold: tied places share one."""


class Tables:
    """The tables of some modules as they are now.

    Args:
        modules: Of a leaf, itself included.
        placed: Ids of the tensors that the plan has placed.
    """

    __slots__ = (
        "_contents",
        "_empty",
        "_full",
        "_items",
        "_names",
        "modules",
        "num_slot_tensors",
        "signature",
        "slots",
    )

    def __init__(self, modules: Iterable[nn.Module], placed: Collection[int]) -> None:
        self.modules = tuple(modules)
        tables = _tables_of(self.modules)
        self._empty = _getter([number for number, table in enumerate(tables) if not table])
        self._full = _getter([number for number, table in enumerate(tables) if table])
        """Most tables hold nothing, which is seen at a glance: this is asked at every call of a leaf."""
        self._names = [*chain.from_iterable(tables)]
        self._items = [*chain.from_iterable(map(dict.values, tables))]
        self.slots, self.signature, tensors = _slots_in(tables, placed)
        self.num_slot_tensors = len(tensors)
        foreign = set(map(id, tensors))
        self._contents = [
            {name: None if id(item) in foreign else item for name, item in table.items()} for table in tables
        ]
        if foreign:
            self._items = []  # nothing in the slots is kept alive

    def are_unchanged(self) -> bool:
        """Returns whether the tables hold what they did; False where other tensors than the leaf's own are in them."""
        if self.slots:
            return False
        tables = _tables_of(self.modules)
        if any(self._empty(tables)):
            return False
        full = self._full(tables)
        return [*chain.from_iterable(full)] == self._names and all(
            map(is_, chain.from_iterable(map(dict.values, full)), self._items)
        )

    def names_of_slots(self) -> list[tuple[str, ...]] | None:
        """Returns for each tensor in the slots the names under which the first module has it; None if the tables now
        hold something else than they did, the slots apart, or if that is not all that a module reads.
        """
        tables = _tables_of(self.modules)
        where = {(slot.table, slot.name): slot.number for slot in self.slots}
        for number, (content, table) in enumerate(zip(self._contents, tables, strict=True)):
            if content.keys() != table.keys():
                return None
            if any(table[name] is not item and (number, name) not in where for name, item in content.items()):
                return None
        prefixes = {id(part): f"{name}." if name else "" for name, part in self.modules[0].named_modules()}
        names: list[list[str]] = [[] for _ in range(self.num_slot_tensors)]
        for (number, name), slot in where.items():
            part = self.modules[number // len(_NAMES)]
            if isinstance(part, nn.RNNBase):  # keeps a second list of its weights
                return None
            names[slot].append(prefixes[id(part)] + name)
        return list(map(tuple, names))

    def slot_tensors(self) -> list[torch.Tensor]:
        """Returns what the slots hold now."""
        tables = _tables_of(self.modules)
        found = {slot.number: tables[slot.table][slot.name] for slot in self.slots}
        return [found[number] for number in range(self.num_slot_tensors)]

    @contextlib.contextmanager
    def holding(self, replacement: Mapping[int, torch.Tensor], in_slots: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let the tables hold what they did when this was made, whatever is in them now.

        Args:
            replacement: By id, what stands for some of the leaf's own parameters and buffers.
            in_slots: The tensors for the slots.
        """
        if not replacement and not in_slots and self.are_unchanged():
            yield
            return
        wanted = [
            {name: replacement.get(id(item), item) for name, item in content.items()} for content in self._contents
        ]
        for slot in self.slots:
            wanted[slot.table][slot.name] = in_slots[slot.number]
        places = [(module.__dict__, name) for module in self.modules for name in _NAMES]
        undo = [(owner, name, owner[name]) for owner, name in places]
        put = [(dict(content), dict(content)) for content in wanted]
        weights = [(part, part._flat_weights) for part in self.modules if isinstance(part, nn.RNNBase)]
        try:
            for (owner, name), (table, _) in zip(places, put, strict=True):
                owner[name] = table
            for part, _ in weights:  # keeps a second list of its weights
                part.__dict__["_flat_weights"] = [getattr(part, name, None) for name in part._flat_weights_names]
            yield
        finally:
            for (owner, name, table), (_, before) in zip(undo, put, strict=True):
                after = owner[name]
                table.update((key, item) for key, item in after.items() if key not in before or before[key] is not item)
                owner[name] = table
            for part, list_of_weights in weights:
                part.__dict__["_flat_weights"] = list_of_weights


def _getter(numbers: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Takes these items out of a list."""
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return itemgetter(slice(numbers[0], numbers[0] + 1) if numbers else slice(0))


def signature_of(modules: Sequence[nn.Module], placed: Collection[int]) -> Any:
    """Equal where the tables hold the same, but for what is in the slots."""
    return _slots_in(_tables_of(modules), placed)[1]


def _tables_of(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    return [*chain.from_iterable(map(_of, map(_attributes, modules)))]


def _slots_in(tables: Sequence[dict[str, Any]], placed: Collection[int]) -> tuple[tuple[Slot, ...], Any, list[Any]]:
    slots: list[Slot] = []
    numbers: dict[int, int] = {}
    tensors: list[Any] = []
    signature: list[Any] = []
    for number, table in enumerate(tables):
        for name, item in table.items():
            if item is not None and id(item) not in placed and isinstance(item, torch.Tensor):
                at = numbers.setdefault(id(item), len(numbers))
                if at == len(tensors):
                    tensors.append(item)
                slots.append(Slot(number, name, at))
                signature.append((name, at))
            else:
                signature.append((name, None if item is None else id(item)))
        signature.append(None)
    return tuple(slots), tuple(signature), tensors


def has_user_hooks(module: nn.Module) -> bool:
    """Returns whether somebody other than torch has hooked `module`."""
    hooks, pre_hooks = module._forward_hooks, module._forward_pre_hooks
    if not (hooks or pre_hooks or module._backward_hooks or module._backward_pre_hooks):
        return are_all_modules_hooked()
    if has_full_backward_hooks(module):
        return True
    return not all(map(is_of_torch, [*hooks.values(), *pre_hooks.values()]))


def is_of_torch(hook: Any) -> bool:
    """Returns whether a hook belongs to the computation: weight norm and the like."""
    return (getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch.")
