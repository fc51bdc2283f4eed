"""Leaves whose modules' tables hold something else than when they were made: variants of them, one for each way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from farspan.lazy.hooks import has_user_hooks
from farspan.lazy.leaf import Leaf
from farspan.lazy.metadata import map_tensors
from farspan.lazy.surgery.tables import signature_of
from farspan.lazy.tensor import LazyTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from farspan.lazy.recorder import Recorder

__all__ = ["note_attribute", "present_leaf"]


def present_leaf(recorder: Recorder, leaf: Leaf, watch: Callable[[nn.Module, Recorder, str], None]) -> Leaf:
    """The leaf for what the tables of `leaf`'s modules hold now: itself, or a variant of it.

    Args:
        recorder: Whose leaf it is.
        leaf: The one that was called last.
        watch: Watches a module that is new among the leaf's.
    """
    if leaf.tables.are_unchanged():
        return leaf
    module = leaf.module
    modules = tuple(module.modules())
    key = (id(module), tuple(map(id, modules)), signature_of(modules, recorder.placed))
    recorder.variants.setdefault((id(leaf.module), *_key_of(recorder, leaf)), leaf)
    known = recorder.variants.get(key)
    if known is None:
        known = recorder.variants[key] = _variant_of(recorder, leaf, modules, watch)
    recorder.leaves[id(module)] = known
    return known


def _key_of(recorder: Recorder, leaf: Leaf) -> tuple[Any, ...]:
    return (tuple(map(id, leaf.modules)), leaf.tables.signature)


def _variant_of(
    recorder: Recorder,
    leaf: Leaf,
    modules: tuple[nn.Module, ...],
    watch: Callable[[nn.Module, Recorder, str], None],
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
    return variant


def note_attribute(recorder: Recorder, module: nn.Module, name: str, value: Any) -> None:
    """The program sets an attribute of a leaf's module: tensors that have a history, or no data here, are arguments of
    the leaf's calls from now on.
    """
    found: list[torch.Tensor] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is LazyTensor or tensor.requires_grad:
            found.append(tensor)
        return tensor

    if isinstance(value, (torch.Tensor, list, tuple, dict)) and not isinstance(value, nn.Parameter):
        map_tensors(value, look)
    if found:
        for leaf in (*recorder.leaves.values(), *recorder.variants.values()):
            for number, part in enumerate(leaf.modules):
                if part is module:
                    leaf.attributes[f"{number}.{name}"] = None
