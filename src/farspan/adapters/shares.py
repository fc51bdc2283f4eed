"""The group's share of the data that trainers read: its batches in training, all of them in evaluation.

    loader         batch 0   batch 1   batch 2   batch 3   ..
    group 0        trains              trains                     evaluates on all
    group 1                  trains              trains           evaluates on all

So metrics are the same in all groups, and nothing has to be gathered.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from farspan.execute.process.world import current_engine
from farspan.record.parameters.copying import plan_by_model

__all__ = ["number_of_groups", "shared_in_training", "this_group"]


def number_of_groups() -> int:
    """Returns how many groups there are that each have a share."""
    engine = current_engine()
    return 1 if engine is None else engine.groups.num_groups


def this_group() -> int:
    """Returns the number of the group that this process is in."""
    engine = current_engine()
    return 0 if engine is None else engine.groups.number


def shared_in_training(make: Callable[[int, int], Any]) -> Any:
    """Returns a loader that reads the group's share while a model trains, and everything else when it begins.

    Args:
        make: Gives the loader of one of several processes, by their number and its own.
    """
    share, whole = make(number_of_groups(), this_group()), make(1, 0)
    _whole_of[share] = whole
    _adapt_kind(type(share))
    return share


_whole_of: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""By loader of a share the loader of everything."""


@functools.cache
def _adapt_kind(kind: Any) -> None:
    """Let loaders of a kind read everything where no model trains, if they have a share."""
    read = kind.__iter__

    @functools.wraps(read)
    def read_either(self: Any) -> Any:
        whole = _whole_of.get(self)
        return read(self) if whole is None or _is_training() else iter(whole)

    kind.__iter__ = read_either


def _is_training() -> bool:
    return torch.is_grad_enabled() and any(model.training for model in plan_by_model)
