"""Watching what a run does: the memory it reads and writes, the tensors it makes, its random draws."""

from __future__ import annotations

import random
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from farspan.lazy.leaf import LeakError
from farspan.lazy.randomness import DRAWS, GENERATORS
from farspan.lazy.torch_private import TorchDispatchMode, flops_of, is_fake, tree_leaves

__all__ = ["Learn", "Made", "Watch", "storage_id", "untouched_generators"]

_STATISTICS = ("running_mean", "running_var")
Made = list["weakref.ref[torch.Tensor]"]


class Learn(TorchFunctionMode):
    """Tells `watch` which torch function is running; a mode changes what some functions do, so it has its own run."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.watch.function = func
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.watch.function = None


class Watch(TorchDispatchMode):
    """Note whether an operation draws random numbers, and which memory is written (by schema: fakes do not count
    the versions of `_foreach_*` arguments).
    """

    def __init__(self, made: Made, outside: Collection[int]) -> None:
        super().__init__()
        self.has_drawn = False
        self.function: Any = None
        """The torch function that is running, where this is known."""
        self.written: set[int] = set()
        self.updated: set[int] = set()
        """Running statistics that an operation writes although its schema does not say so."""
        self.written_plain: dict[int, torch.Tensor] = {}
        """By id the tensors that are no fakes, and written."""
        self.used: set[int] = set()
        """The memory that any operation reads or writes."""
        self.made = made
        self.flops = 0
        self.outside = outside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
        if any(id(item) in self.outside for item in tensors):
            raise LeakError(f"{func} reaches a parameter outside the call")
        self.used.update(map(storage_id, tensors))
        schema = func._schema.arguments
        if "batch_norm" in func.__name__:
            given = {item.name: value for item, value in zip(schema, args, strict=False)} | (kwargs or {})
            self.updated.update(storage_id(given[name]) for name in _STATISTICS if given.get(name) is not None)
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            given = {item.name: value for item, value in zip(schema, args, strict=False)} | (kwargs or {})
            if torch.Tag.nondeterministic_seeded in func.tags and not _is_switched_off(schema, given):
                self.has_drawn = True
                if self.function is not None:
                    DRAWS.add(self.function)
            for item in schema:
                if item.alias_info is not None and item.alias_info.is_write and given.get(item.name) is not None:
                    value = given[item.name]
                    values = value if isinstance(value, (list, tuple)) else (value,)
                    self.written.update(map(storage_id, values))
                    self.written_plain.update((id(part), part) for part in values if not is_fake(part))
        result = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, result)
        self.made += [weakref.ref(item) for item in tree_leaves(result) if isinstance(item, torch.Tensor)]
        return result


class _Generators:
    have_drawn = False


def _is_switched_off(schema: Any, given: dict[str, Any]) -> bool:
    """Whether an operation that may draw random numbers does not: dropout of probability 0, or not in training."""
    values = {item.name: given.get(item.name, item.default_value) for item in schema}
    return any(values.get(name, 1) == 0 for name in ("dropout_p", "p", "dropout", "train", "training"))


@contextmanager
def untouched_generators() -> Iterator[_Generators]:
    """Leave Python's, numpy's and torch's generators as they were, and note whether the first two were used."""
    noted = _Generators()
    with GENERATORS, torch.random.fork_rng(devices=[]):
        python, numpy_state = random.getstate(), np.random.get_state()
        try:
            yield noted
        finally:
            after = np.random.get_state()
            noted.have_drawn = random.getstate() != python or not all(map(np.array_equal, after, numpy_state))
            random.setstate(python)
            np.random.set_state(numpy_state)


def storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
