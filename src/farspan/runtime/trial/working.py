"""Memory that a piece of a step needs while it runs, and has given back when it is over or keeps for its backward.

forward     alive |====__      most - kept by autograd           backward    |==__         most, from where it begins;
                  |========                                                  |======____     what was kept goes
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection
from typing import Any

import torch

from farspan.lazy.torch_private import TorchDispatchMode, tree_leaves
from farspan.lazy.watch import storage_id

__all__ = ["Working"]


class Working(TorchDispatchMode):
    """Notes the memory that operations make, and when it goes."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[int, int]] = []
        """(number of the piece of memory, its bytes; negative when it goes)."""
        self._numbers = itertools.count()
        self._alive: dict[int, int] = {}
        """By id of a storage its number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_id(item) for item in _tensors((args, kwargs))}
        for item in _tensors(result):
            key = storage_id(item)
            if key not in self._alive and key not in given:
                storage = item.untyped_storage()
                self._alive[key] = number = next(self._numbers)
                self._events.append((number, storage.nbytes()))
                weakref.finalize(storage, self._free, key, storage.nbytes())
        return result

    def begin(self) -> int:
        """Where a piece of the step begins, for `peak`."""
        return len(self._events)

    def peak(self, begin: int, apart: Collection[int] = (), passing: Collection[int] = ()) -> int:
        """The most bytes that were alive since `begin`, more than at `begin`; without the storages of the ids `apart`,
        and those `passing` only at the moment when they were made (a gradient that others are added to).
        """
        left_out = {self._alive.get(key) for key in apart}
        gone_at_once = {self._alive.get(key) for key in passing}
        alive = most = 0
        for number, size in self._events[begin:]:
            if number not in left_out:
                most = max(most, alive + size)
                alive += 0 if number in gone_at_once else size
        return most

    def made(self, begin: int, keys: Collection[int]) -> int:
        """The bytes of those storages of these ids that were made since `begin`."""
        wanted = {self._alive.get(key) for key in keys}
        return sum(size for number, size in self._events[begin:] if size > 0 and number in wanted)

    def given_back(self, begin: int) -> int:
        """The bytes of what was there at `begin` and is not any more."""
        made = {number for number, size in self._events[begin:] if size > 0}
        return -sum(size for number, size in self._events[begin:] if size < 0 and number not in made)

    def _free(self, key: int, size: int) -> None:
        self._events.append((self._alive.pop(key), -size))


def _tensors(item: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(item) if isinstance(each, torch.Tensor) and each.layout is torch.strided]
