"""In-place operations: values have versions, and who holds the tensor moves on to the new one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from farspan.graph import Call, Value
from farspan.lazy.metadata import Entry, meta_of
from farspan.lazy.ops.functions import format_where
from farspan.lazy.tensor import LazyTensor
from farspan.lazy.torch_private import become, has_own_memory

if TYPE_CHECKING:
    from farspan.lazy.leaf import Placed
    from farspan.lazy.recorder import Recorder

__all__ = [
    "can_be_recorded",
    "join_family",
    "let_record",
    "let_record_written",
    "plain_versions",
    "prepare_mutation",
    "written_parameters",
]


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
            _refuse_shared(recorder, call)
        if any(member is not None and member is not tensor for member in _family_of(tensor)):
            recorder.refuse(
                f"{call.entry.name} writes into a tensor of which a view is still in use",
                why=f"at {format_where(call.where)}: the view would have to change with it.",
                hint="use the out-of-place operation, or write before taking the view",
            )
        level = max(level, recorder.current.read_level.get((tensor._value, call.stage), 0))
    return level


def let_record(recorder: Recorder, entry: Entry, tensors: list[torch.Tensor], stage: int) -> bool:
    """A call writes into plain tensors, which every rank has: let each be a recorded one, at home where it is written.

    What was recorded before runs first, with it as it was. A tensor whose memory others share stays plain:
    `prepare_mutation` refuses it.

    Returns:
        Whether there was any.
    """
    plain = [tensors[i] for i in entry.mutated if can_be_recorded(recorder, tensors[i])]
    if not plain:
        return False
    recorder.flush_before_change("a plain tensor is written")
    for tensor in plain:
        value = Value(meta_of(tensor), stage)
        lazy = LazyTensor.make(value, recorder)
        value.lazy = None
        if become(tensor, lazy):
            value.lazy = weakref.ref(tensor)
            value.data = lazy  # which is the plain one now
    return True


def let_record_written(recorder: Recorder, call: Call, tensors: list[torch.Tensor], recordable: Sequence[bool]) -> None:
    """A call that had to run to be known has written into plain tensors, at its owner: what they are now is recorded.

    Args:
        recorder: Whose program it is.
        call: Has run.
        tensors: Those among its arguments.
        recordable: For each whether it could be a recorded one, before the run.

    Raises:
        RecordError: One of them cannot.
    """
    for number, argument in enumerate(call.entry.mutated):
        tensor = tensors[argument]
        if type(tensor) is LazyTensor or id(tensor) in recorder.placed:
            continue
        value = call.outputs[call.entry.num_results + number]
        lazy = LazyTensor.make(value, recorder)
        value.lazy = None
        if not recordable[argument] or not become(tensor, lazy):
            _refuse_shared(recorder, call)
        value.lazy = weakref.ref(tensor)
        value.data = lazy if value.data is tensor else value.data


def _refuse_shared(recorder: Recorder, call: Call) -> NoReturn:
    recorder.refuse(
        f"{call.entry.name} writes recorded values into a plain tensor",
        why=f"at {format_where(call.where)}: others (a view, an array, a module) have its memory too.",
        hint="use the out-of-place operation (torch.where, torch.cat, tensor.clone() first)",
    )


def can_be_recorded(recorder: Recorder, tensor: torch.Tensor) -> bool:
    """Whether the program may hold a recorded tensor in the place of this plain one."""
    return (
        type(tensor) is torch.Tensor
        and id(tensor) not in recorder.placed
        and id(tensor) not in recorder.buffers
        and not tensor.requires_grad
        and has_own_memory(tensor)
    )


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
