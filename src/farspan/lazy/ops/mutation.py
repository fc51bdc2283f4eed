"""In-place operations: values have versions, and who holds the tensor moves on to the new one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from farspan.graph import Call
from farspan.lazy.metadata import Entry
from farspan.lazy.ops.functions import format_where
from farspan.lazy.tensor import LazyTensor

if TYPE_CHECKING:
    from farspan.lazy.leaf import Placed
    from farspan.lazy.recorder import Recorder

__all__ = ["join_family", "plain_versions", "prepare_mutation", "written_parameters"]


def prepare_mutation(recorder: Recorder, call: Call, tensors: list[torch.Tensor]) -> int:
    """Check that what `call` writes into may be written, and return the level up to which the old version is read.

    Raises:
        RecordError: A view of the tensor is in use, or it is no recorded tensor.
    """
    level = 0
    for argument in call.entry.mutated:
        tensor = tensors[argument]
        if id(tensor) in recorder.placed:
            continue
        if type(tensor) is not LazyTensor:
            recorder.refuse(
                f"{call.entry.name} writes recorded values into a plain tensor",
                why=f"at {format_where(call.where)}: the plain tensor exists on every rank, the values on one.",
                hint="use the out-of-place operation (torch.where, torch.cat, tensor.clone() first)",
            )
        if any(member is not None and member is not tensor for member in _family_of(tensor)):
            recorder.refuse(
                f"{call.entry.name} writes into a tensor of which a view is still in use",
                why=f"at {format_where(call.where)}: the view would have to change with it.",
                hint="use the out-of-place operation, or write before taking the view",
            )
        level = max(level, recorder.current.read_level.get((tensor._value, call.stage), 0))
    return level


def plain_versions(arguments: Sequence[Any]) -> tuple[int, ...]:
    """How often each plain tensor among `arguments` has been written to."""
    return tuple([item._version for item in arguments if isinstance(item, torch.Tensor) and not item.is_inference()])


def written_parameters(recorder: Recorder, entry: Entry, tensors: list[torch.Tensor]) -> list[Placed]:
    """The parameters a call writes into, themselves or through `param.data`."""
    found: list[Placed] = []
    for tensor in (tensors[i] for i in entry.mutated):
        placed = recorder.placed.get(id(tensor)) or getattr(tensor, "_alias_of", None)
        if placed is not None:
            found.append(placed)
    return found


# Tensors that share memory: views of one another. In eager torch a write into one shows in all.


def join_family(lazy: Any, base: Any) -> None:
    """`lazy` is a view of `base`."""
    family = getattr(base, "_family", None)
    if family is None:
        family = [weakref.ref(base)]
        base._family = family
    family.append(weakref.ref(lazy))
    lazy._family = family


def _family_of(lazy: Any) -> list[Any]:
    return [member() for member in getattr(lazy, "_family", [])]
