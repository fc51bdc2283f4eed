"""The repeated blocks of a model: what `remat=True` computes again, one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

__all__ = ["repeated_blocks"]


def repeated_blocks(model: nn.Module) -> list[str]:
    """Returns names of the outermost blocks that a model holds in lists.

    A block is an entry of a `ModuleList`, or an entry of a `Sequential` that has parts of its own and of whose class
    there are several in it. Where an entry is a list itself and has blocks, these are meant.

    Example:
        >>> layer = lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        >>> repeated_blocks(nn.ModuleDict({"embed": nn.Embedding(3, 2), "layers": nn.ModuleList([layer(), layer()])}))
        ['layers.0', 'layers.1']
        >>> repeated_blocks(nn.Sequential(layer(), layer(), nn.Linear(2, 3)))
        ['0', '1']
        >>> repeated_blocks(layer())
        []
    """
    return list(_blocks_in(model, ""))


def _blocks_in(module: nn.Module, prefix: str) -> Iterator[str]:
    entries = _entries_that_count(module)
    for name, child in module.named_children():
        if name not in entries:
            yield from _blocks_in(child, f"{prefix}{name}.")
        elif isinstance(child, _LISTS) and (inner := list(_blocks_in(child, f"{prefix}{name}."))):
            yield from inner
        else:
            yield prefix + name


def _entries_that_count(module: nn.Module) -> set[str]:
    children = dict(module.named_children())
    if isinstance(module, nn.ModuleList):
        return set(children)
    if not isinstance(module, nn.Sequential):
        return set()
    numbers = Counter(type(child) for child in children.values())
    return {name for name, child in children.items() if numbers[type(child)] > 1 and any(child.children())}


_LISTS = (nn.ModuleList, nn.Sequential)
