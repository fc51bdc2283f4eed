"""`copy.deepcopy` of a distributed model, or of a part of it: another one, that lies where the first one does."""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from farspan.call.leaf import Leaf, Placed
from farspan.record.tensor import StubParameter
from farspan.record.unrecorded import unrecorded

if TYPE_CHECKING:
    from collections.abc import Callable

    from farspan.record.recording import Recording

__all__ = ["copy_module", "copy_parameter", "copy_plainly", "plan_by_model"]

plan_by_model: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""The plan of each distributed model. Not an attribute of the model, which is pickled as it was."""


def copy_plainly(module: nn.Module, memo: dict[int, Any]) -> Any:
    """Copies as `copy.deepcopy` does an object that has no way of its own, and as torch does a parametrized one."""
    if parametrize.is_parametrized(module):
        result = memo[id(module)] = type(module).__new__(type(module))
        result.__dict__ = copy.deepcopy(module.__dict__, memo)
        return result
    return copy._reconstruct(module, memo, *module.__reduce_ex__(4))  # type: ignore[attr-defined]


def copy_parameter(recorder: Recording, placed: Placed, memo: dict[int, Any]) -> torch.Tensor:
    """Copy a parameter without its module: a plain one, of its present value, on each rank that asks."""
    tensor = placed.tensor
    recorder.before_read(tensor)
    with unrecorded(recorder):
        data = recorder.engine.read_parameter(placed).clone()
        memo[id(tensor)] = nn.Parameter(data, tensor.requires_grad) if placed.is_parameter else data
    return memo[id(tensor)]


def copy_module(
    recorder: Recording,
    module: nn.Module,
    memo: dict[int, Any],
    watch_module: Callable[[nn.Module, Recording, str], None],
    watch_parameter: Callable[[torch.Tensor, Recording], None],
) -> nn.Module:
    """Copy `module`; every rank copies the parameters that it owns."""
    recorder.flush_before_change("copy.deepcopy of a model")
    recorder.num_copies += 1
    prefix = f"copy{recorder.num_copies}."
    placed: list[Placed] = []
    with unrecorded(recorder):
        for tensor in [*module.parameters(), *module.buffers()]:
            known = recorder.placed.get(id(tensor))
            if known is not None and id(tensor) not in memo:
                memo[id(tensor)] = _copy_tensor(recorder, known, prefix + known.name)
                placed.append(_placed_like(known, prefix + known.name, memo[id(tensor)]))
        result = copy_plainly(module, memo)
    by_id = {id(item.tensor): item for item in placed}
    recorder.placed.update(by_id)
    for item in placed:
        if item.is_parameter:
            watch_parameter(item.tensor, recorder)
    leaves: list[Leaf] = []
    for (name, old), new in zip(module.named_modules(), result.modules(), strict=True):
        watch_module(new, recorder, prefix + name)
        leaf = recorder.leaves.get(id(old))
        if leaf is not None:
            below = [by_id[id(item)] for item in (*new.parameters(), *new.buffers()) if id(item) in by_id]
            new_leaf = recorder.leaves[id(new)] = Leaf(prefix + leaf.name, new, leaf.stage, below)
            new_leaf.is_open = leaf.is_open
            new_leaf.attributes.update(leaf.attributes)
            new_leaf.settings.update(leaf.settings)
            new_leaf.settings.update(leaf.settings)
            recorder.leaf_parts.update(map(id, new_leaf.modules))
            leaves.append(new_leaf)
        if id(old) in recorder.roots:
            recorder.roots[id(new)] = prefix
        if old in plan_by_model:
            plan_by_model[new] = plan_by_model[old]
    recorder.keep_alive.append((result, leaves, placed))
    recorder.engine.add_parameters(placed)
    recorder.engine.barrier("copy.deepcopy of a model")  # from here on others may ask for what this rank has copied
    return result


def _copy_tensor(recorder: Recording, known: Placed, name: str) -> torch.Tensor:
    tensor = known.tensor
    if not known.is_owned:
        stub = StubParameter.make(name, known.meta, recorder, is_parameter=known.is_parameter)
        return stub.requires_grad_(tensor.requires_grad)
    data = tensor.detach().clone()
    return nn.Parameter(data, tensor.requires_grad) if known.is_parameter else data


def _placed_like(known: Placed, name: str, tensor: torch.Tensor) -> Placed:
    return Placed(
        name,
        known.stage,
        tensor,
        known.meta,
        known.is_owned,
        known.is_parameter,
        type(tensor) if known.is_owned else known.kind,
        is_shared=known.is_shared,
        is_written=known.is_written,
        is_saved=known.is_saved,
        is_copy=True,
    )
