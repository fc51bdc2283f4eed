"""What a run on fakes has left behind: tensors without data, in lists and caches outside the call."""

from __future__ import annotations

import functools
import gc
import threading
import types
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["remove_leaked"]

_CacheWrapper: Any = type(functools.lru_cache(lambda: None))
_one_at_a_time = threading.Lock()
_CACHE_DEPTH = 5
"""From a tensor to the cache that keeps it: a tuple or an object it is in, the result, an entry, the table."""
_NO_CONTENTS = (type, types.FrameType, types.ModuleType, torch.nn.Module)


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
    _empty_caches(leaked)
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


def _empty_caches(tensors: Sequence[torch.Tensor]) -> None:
    """Look upwards from the tensors: a list of all objects would hold tuples that other threads are still making."""
    level: list[Any] = list(tensors)
    seen = {id(item) for item in level}
    for _ in range(_CACHE_DEPTH):
        holders = [
            item
            for item in gc.get_referrers(*level)
            if id(item) not in seen and item is not level and item is not tensors and not isinstance(item, _NO_CONTENTS)
        ]
        for item in holders:
            if type(item) is _CacheWrapper:
                item.cache_clear()
        seen.update(map(id, holders))
        level = [item for item in holders if not callable(item)]
