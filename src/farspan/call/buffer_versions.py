"""Versions of the buffers that a module writes: what an earlier micro-batch has saved of one stays what it was.

In the plain program F1 writes into what B0 no longer needs; in a pipeline B0 is still to come. So F1 runs on a copy,
which is the buffer from then on:

    plain program       F0 B0 F1 B1
    in a pipeline       F0 F1 B0 B1
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from farspan.call.infer.watch import storage_id
from farspan.call.leaf import Leaf, Placed, reaches_outside, swapped
from farspan.errors import RecordError
from farspan.torch_private import modules_held_by, saved_by

if TYPE_CHECKING:
    from farspan.graph import Call

__all__ = ["buffers_before", "copies_of", "note_saved", "own_versions", "versioned"]

_Slot = tuple[dict[str, Any], str]


def note_saved(outputs: Iterable[torch.Tensor], memory: Sequence[tuple[Placed, set[int]]]) -> bool:
    """Let the buffers know whose memory the autograd graphs of `outputs` have saved.

    Args:
        outputs: Of a run.
        memory: For each parameter and buffer all memory that it has had in the run.

    Returns:
        Whether the backward may write into buffers: it may run code again that does, or knows the module of one.
    """
    buffers = [(item, ids) for item, ids in memory if not item.is_parameter]
    if not buffers:
        return False
    saved, is_packed = saved_by(outputs)
    saved_ids = set(map(storage_id, saved))
    known = {id(buffer) for module in modules_held_by(outputs) for buffer in module.buffers()} if is_packed else ()
    for item, ids in buffers:
        item.is_saved |= is_packed or not ids.isdisjoint(saved_ids)
        item.is_written |= id(item.tensor) in known
    return is_packed and any(item.is_written for item, _ in buffers)


@contextlib.contextmanager
def own_versions(leaf: Leaf, *, is_known: bool) -> Iterator[list[torch.Tensor]]:
    """Run a call of `leaf` on copies of those buffers that calls write and autograd saves; then they are the buffers.

    Args:
        is_known: Whether it is known which these are; else all are copied.

    Yields:
        The copies.
    """
    items = versioned(leaf) if is_known else _held(leaf)
    if not items:
        yield []
        return
    slots = {id(item.tensor): _slots_of(leaf.modules, item.tensor) for item in items}
    copies = copies_of([item.tensor for item in items])
    written: list[tuple[Placed, torch.Tensor]] = []
    try:
        with swapped(leaf.modules, copies):
            try:
                yield list(copies.values())
            except Exception as error:
                if not reaches_outside(error):
                    written += [(item, _now(item, slots[id(item.tensor)])) for item in items]
                raise
            written += [(item, _now(item, slots[id(item.tensor)])) for item in items]
    finally:
        for item, tensor in written:
            item.tensor.data = tensor


def versioned(leaf: Leaf) -> list[Placed]:
    """Returns the buffers of which each call needs a version of its own, and those that share memory with one of
    them."""
    items = _held(leaf)
    if not any(item.is_written for item in items) or not any(item.is_saved for item in items):
        return []
    groups: dict[int, list[Placed]] = {}
    for item in items:
        groups.setdefault(storage_id(item.tensor), []).append(item)
    return [
        item
        for group in groups.values()
        if any(item.is_written for item in group) and any(item.is_saved for item in group)
        for item in group
    ]


def buffers_before(call: Call, leaf: Leaf) -> dict[str, torch.Tensor]:
    """Returns by name the buffers that calls of `leaf` write, as they are: `call`, which is about to run, is or may be
    computed again for a derivative.

    One of which it gets a version of its own stays what it is; others are copied.
    """
    if not call.buffer_names and (call.is_closing or not call.entry.requires_grad):
        return {}
    written = [item for item in _held(leaf) if item.is_written]
    kept = set(map(id, versioned(leaf))) if written else ()
    return {item.name: item.tensor.detach() if id(item) in kept else item.tensor.detach().clone() for item in written}


def _held(leaf: Leaf) -> list[Placed]:
    """Returns the buffers that its modules hold here: those of other stages (a wide one has all so) are arguments."""
    return [item for item in leaf.buffers if item.is_owned and item.stage == leaf.stage]


def _slots_of(modules: Sequence[nn.Module], tensor: torch.Tensor) -> list[_Slot]:
    tables: list[Any] = [module._buffers for module in modules]
    return [(table, name) for table in tables for name, item in table.items() if item is tensor]


def _now(item: Placed, slots: Sequence[_Slot]) -> torch.Tensor:
    """Returns what the modules hold in place of a buffer once a call has run."""
    found = {id(table.get(name)): table.get(name) for table, name in slots}
    if len(found) > 1:
        raise RecordError(
            f"the buffer {item.name}, which several modules share, was replaced in one of them.",
            why="from then on they are two buffers, and the model has one.",
            hint="write into it: self.buffer.copy_(value)",
        )
    tensor = next(iter(found.values()))
    if not isinstance(tensor, torch.Tensor):
        return item.tensor.data  # it was taken away, and every rank goes on to have it
    return tensor.detach()


def copies_of(tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Copies tensors, by id, into memory of their own; copies of tensors that share memory share it too."""
    memory = Counter(storage_id(tensor) for tensor in tensors)
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        plain, key = tensor.detach(), storage_id(tensor)
        if memory[key] == 1:
            copies[id(tensor)] = plain.clone()
            continue
        if key not in storages:
            storages[key] = plain.untyped_storage().clone()
        copy = torch.empty(0, dtype=plain.dtype, device=plain.device)
        copies[id(tensor)] = copy.set_(storages[key], plain.storage_offset(), plain.shape, plain.stride())
    return copies
