"""Leaves whose modules' tables hold something else than when they were made: variants of them, one for each way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from farspan.call.draws.scope import active
from farspan.call.leaf import Leaf
from farspan.call.module_tables import has_user_hooks, signature_of
from farspan.call.pytree.by_id import ById
from farspan.call.pytree.canonical import canonical, is_plain
from farspan.call.pytree.template import map_tensors
from farspan.record.tensor import LazyTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from farspan.record.recording import Recording

__all__ = ["is_set_already", "note_attribute", "present_leaf", "set_on_parameter"]

_NAMES = frozenset(dir(torch.nn.Parameter)) | {"_is_param", "_name", "_recorder"}
"""Attributes of parameters, and of the stubs of other ranks' parameters, that are not the program's."""


def present_leaf(recorder: Recording, leaf: Leaf, watch: Callable[[nn.Module, Recording, str], None]) -> Leaf:
    """Returns the leaf for what the tables of `leaf`'s modules hold now, which is not what they held: a variant of it.

    Args:
        recorder: Whose leaf it is.
        leaf: The one that was called last.
        watch: Watches a module that is new among the leaf's.
    """
    module = leaf.module
    modules = tuple(module.modules())
    key = (id(module), tuple(map(id, modules)), signature_of(modules, recorder.placed))
    recorder.variants.setdefault((id(leaf.module), *_key_of(recorder, leaf)), leaf)
    known = recorder.variants.get(key)
    if known is None:
        known = recorder.variants[key] = _variant_of(recorder, leaf, modules, watch)
    recorder.leaves[id(module)] = known
    return known


def _key_of(recorder: Recording, leaf: Leaf) -> tuple[Any, ...]:
    return (tuple(map(id, leaf.modules)), leaf.tables.signature)


def _variant_of(
    recorder: Recording,
    leaf: Leaf,
    modules: tuple[nn.Module, ...],
    watch: Callable[[nn.Module, Recording, str], None],
) -> Leaf:
    below = [*leaf.module.parameters(), *leaf.module.buffers()]
    variant = Leaf(
        leaf.name, leaf.module, leaf.stage, [recorder.placed[id(item)] for item in below if id(item) in recorder.placed]
    )
    for name, part in leaf.module.named_modules():
        if id(part) not in recorder.leaf_parts:
            watch(part, recorder, f"{leaf.name}.{name}" if leaf.name else name)
            recorder.leaf_parts.add(id(part))
    variant.is_open = any(map(has_user_hooks, modules[1:])) or (leaf.is_open and modules == leaf.modules)
    numbers = {id(part): number for number, part in enumerate(modules)}
    for attribute in leaf.attributes:
        number, _, name = attribute.partition(".")
        at = numbers.get(id(leaf.modules[int(number)]))
        if at is not None:
            variant.attributes[f"{at}.{name}"] = None
    for setting, value in leaf.settings.items():
        number, _, name = setting.partition(".")
        if "/" in setting:
            variant.settings[setting] = value
            continue
        at = numbers.get(id(leaf.modules[int(number)]))
        if at is not None:
            variant.settings[f"{at}.{name}"] = value
    return variant


def is_set_already(module: nn.Module, name: str, value: Any) -> bool:
    """Returns whether setting an attribute changes nothing: `model.train()` in each micro-batch."""
    held = vars(module)
    return is_plain(value) and name in held and is_plain(held[name]) and canonical(held[name]) == canonical(value)


def note_attribute(recorder: Recording, module: nn.Module, name: str, value: Any) -> None:
    """The program is about to set an attribute of a leaf's module, or to delete it: what was recorded runs first. What
    its calls give is predicted again; tensors that have a history, or no data here, are arguments of them from now on.
    """
    recorder.flush_before_change(f"{type(module).__name__}.{name} is set")
    found: list[torch.Tensor] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is LazyTensor or tensor.requires_grad:
            found.append(tensor)
        return tensor

    if isinstance(value, (torch.Tensor, list, tuple, dict)) and not isinstance(value, nn.Parameter):
        map_tensors(value, look)
    setting = _setting(value)
    for leaf in (*recorder.leaves.values(), *recorder.variants.values()):
        leaf.own_objects = None
        for number, part in enumerate(leaf.modules):
            if part is module:
                leaf.state = leaf.surroundings = None
                leaf.settings[f"{number}.{name}"] = setting
                if found:
                    leaf.attributes[f"{number}.{name}"] = None


def set_on_parameter(parameter: Any, name: str, value: Any) -> None:
    """Set an attribute of a parameter; one of the program's own may be what modules read: as above."""
    recorder = active.recorder
    placed = None if recorder is None or name in _NAMES else recorder.placed.get(id(parameter))
    if recorder is not None and placed is not None and placed.is_parameter and recorder.is_recording:
        recorder.flush_before_change(f"an attribute ({name}) of {placed.name} is set")
        setting = _setting(value)
        for leaf in (*recorder.leaves.values(), *recorder.variants.values()):
            if placed in leaf.placed:
                leaf.state = None
                leaf.settings[f"{placed.name}/{name}"] = setting
    object.__setattr__(parameter, name, value)


def _setting(value: Any) -> Any:
    """Returns what predictions depend on when an attribute has this value."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype, value.requires_grad)
    return canonical(value) if is_plain(value) else ById(value)
