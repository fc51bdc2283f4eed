"""Removes what a run on fakes has left behind: tensors without data, in lists and caches outside the call."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import torch

from farspan.locks import Lock

__all__ = ["remove_leaked"]

_CacheWrapper: Any = type(functools.lru_cache(lambda: None))
_one_at_a_time = Lock("the search for what keeps a tensor")
_CACHE_DEPTH = 5
"""Steps from a cache to a tensor in what it keeps: its table, an entry, the result, a tuple or an object in it."""


def remove_leaked(made: Sequence[weakref.ref[torch.Tensor]]) -> bool:
    """Take what is alive of `made` away from where it is kept.

    Returns:
        Whether there was any but in caches of functions, which are only emptied: they come to the same again.
    """
    if all(reference() is None for reference in made):
        return False
    with _one_at_a_time:  # a scan holds all objects meanwhile
        return _remove(made)


def _remove(made: Sequence[weakref.ref[torch.Tensor]]) -> bool:
    for generation in (1, 2):  # what is alive only in circles; a process of many objects takes long for the oldest
        gc.collect(generation)
        leaked = _alive(made)
        if not leaked:
            return False
    holders = _holders(leaked)
    caches = [item for item in holders if _is_cache_of(item, {id(tensor) for tensor in leaked})]
    if caches:
        del leaked, holders
        for cache in caches:
            cache.cache_clear()
        leaked = _alive(made)
        holders = _holders(leaked) if leaked else []
    ids = set(map(id, leaked))
    for holder in holders:
        if isinstance(holder, (list, deque)):
            for number in reversed([number for number, item in enumerate(holder) if id(item) in ids]):
                del holder[number]
        elif isinstance(holder, dict):
            for key in [key for key, item in holder.items() if id(item) in ids]:
                del holder[key]
    return bool(leaked)


def _holders(tensors: list[torch.Tensor]) -> list[Any]:
    """Returns what refers to one of them, and all caches of functions. It scans all objects once, which takes long."""
    # Not `gc.get_objects()`: it would hold tuples that other threads are still making, and they may not be held then.
    return [item for item in gc.get_referrers(_CacheWrapper, *tensors) if item is not tensors]


def _alive(made: Sequence[weakref.ref[torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for tensor in [reference() for reference in made] if tensor is not None]


def _is_cache_of(item: Any, tensors: Collection[int]) -> bool:
    return type(item) is _CacheWrapper and bool(item.cache_info().currsize) and _reaches(item, tensors)


def _reaches(item: Any, tensors: Collection[int]) -> bool:
    level, seen = [item], {id(item)}
    for _ in range(_CACHE_DEPTH):
        level = [
            part
            for part in gc.get_referents(*level)
            if id(part) not in seen and not isinstance(part, (type, torch.nn.Module)) and not callable(part)
        ]
        seen.update(map(id, level))
        if any(id(part) in tensors for part in level):
            return True
    return False
