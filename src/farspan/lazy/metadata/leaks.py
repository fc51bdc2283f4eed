"""What a run on fakes has left behind: tensors without data, in lists and caches outside the call."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import torch

__all__ = ["remove_leaked"]

_CacheWrapper: Any = type(functools.lru_cache(lambda: None))
_one_at_a_time = threading.Lock()
_CACHE_DEPTH = 5
"""From a cache to a tensor in what it keeps: its table, an entry, the result, a tuple or an object in it."""


def remove_leaked(made: Sequence[weakref.ref[torch.Tensor]]) -> bool:
    """Take what is alive of `made` away from where it is kept.

    Returns:
        Whether there was any but in caches of functions, which are only emptied: they come to the same again.
    """
    if all(reference() is None for reference in made):
        return False
    with _one_at_a_time:  # who looks at all objects holds them meanwhile
        return _remove(made)


def _remove(made: Sequence[weakref.ref[torch.Tensor]]) -> bool:
    gc.collect()  # what is alive only in circles
    leaked = _alive(made)
    if not leaked:
        return False
    _empty_caches({id(tensor) for tensor in leaked})
    del leaked
    leaked = _alive(made)
    for tensor in leaked:
        for holder in gc.get_referrers(tensor):
            if holder is leaked:
                continue
            if isinstance(holder, (list, deque)):
                for number in reversed([number for number, item in enumerate(holder) if item is tensor]):
                    del holder[number]
            elif isinstance(holder, dict):
                for key in [key for key, item in holder.items() if item is tensor]:
                    del holder[key]
    return bool(leaked)


def _alive(made: Sequence[weakref.ref[torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for tensor in [reference() for reference in made] if tensor is not None]


def _empty_caches(tensors: Collection[int]) -> None:
    # Not all objects: that would hold tuples which other threads are still making, and they may not be held then.
    for item in gc.get_referrers(_CacheWrapper):
        if type(item) is _CacheWrapper and item.cache_info().currsize and _reaches(item, tensors):
            item.cache_clear()


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
