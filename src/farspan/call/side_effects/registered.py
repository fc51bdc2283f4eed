"""Finds what a run of a leaf changes in what its modules have registered: parameters, buffers, parts, what is frozen.

    self.weight = nn.Parameter(...)    self.head = nn.Linear(...)    self.register_buffer("mask", ...)    del self.scale

One rank alone runs a leaf, and the change belongs to the modules of all ranks. So such a leaf is called part by part,
and every rank makes the change. A buffer in whose place another one of its kind is put is no such change: it has been
written as a whole (`self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()`), and stays with its owner.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from farspan.call.leaf import LeakError

__all__ = ["Registered", "torch_tables_kept"]

_TABLES = ("_parameters", "_buffers", "_modules")
_ALL_TABLES = frozenset(
    [
        *_TABLES, "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_backward_hooks",
        "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called", "_backward_pre_hooks",
    ]
)  # fmt: skip


class Registered:
    """A snapshot of what some modules have registered.

    Args:
        modules: Of a leaf, itself included.
        name: Of the leaf.
        own: Ids of the buffers that are the leaf's own, and so with their owner only.
    """

    def __init__(self, modules: Sequence[nn.Module], name: str, own: Collection[int]) -> None:
        self._name = name
        self._own = own
        self._before = [(module, table, dict(module.__dict__[table])) for module in modules for table in _TABLES]
        self._local_only = [(module, set(module._non_persistent_buffers_set)) for module in modules]
        self._flags = [(tensor, tensor.requires_grad) for module in modules for tensor in _parameters_of(module)]

    def check(self) -> dict[int, torch.Tensor]:
        """Returns the buffers that have replaced others, by ids of the replaced ones.

        Raises:
            LeakError: Something else is registered. All is as it was then.
        """
        replaced: dict[int, torch.Tensor] = {}
        for module, table, before in self._before:
            now = module.__dict__[table]
            for name in dict.fromkeys([*before, *now]):
                old, new = before.get(name, self), now.get(name, self)
                if old is new:
                    continue
                if id(old) not in self._own or not _is_of_its_kind(new, old):
                    self._put_back()
                    raise LeakError(f"{self._name} sets {_KINDS[table]} ({name}) while it is called")
                replaced[id(old)] = new
        if any(tensor.requires_grad != flag for tensor, flag in self._flags):
            self._put_back()
            raise LeakError(f"{self._name} freezes parameters while it is called")
        if any(module._non_persistent_buffers_set != names for module, names in self._local_only):
            self._put_back()
            raise LeakError(f"{self._name} changes which of its buffers are saved")
        return replaced

    def _put_back(self) -> None:
        for module, table, before in self._before:
            module.__dict__[table].clear()
            module.__dict__[table].update(before)
        for tensor, flag in self._flags:
            tensor.requires_grad = flag
        for module, names in self._local_only:
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(names)


_KINDS = {"_parameters": "a parameter", "_buffers": "a buffer", "_modules": "a part"}


def _parameters_of(module: nn.Module) -> list[nn.Parameter]:
    return [tensor for tensor in module._parameters.values() if tensor is not None]


def _is_of_its_kind(new: Any, old: Any) -> bool:
    """Returns whether a tensor can replace a buffer on all ranks: they know its shape, and that no gradient flows to
    it."""
    return (
        isinstance(new, torch.Tensor)
        and isinstance(old, torch.Tensor)
        and (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device)
        and not new.requires_grad
    )


@contextmanager
def torch_tables_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put back what a run leaves in the modules' own tables: buffers that were set, hooks.

    Raises:
        LeakError: It has left hooks, which belong to later calls on every rank.
    """
    before = [
        (module, {name: (table, dict(table)) for name, table in module.__dict__.items() if name in _ALL_TABLES})
        for module in modules
    ]
    has_left_hooks = False
    try:
        yield
    finally:
        for module, tables in before:
            for name, (table, content) in tables.items():
                has_left_hooks |= "_hooks" in name and module.__dict__[name].keys() != content.keys()
                module.__dict__[name] = table
                table.clear()
                table.update(content)
    if has_left_hooks:
        raise LeakError("a module registers hooks while it is called")
