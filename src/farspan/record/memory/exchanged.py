"""Letting the program hold a recorded tensor where it held a plain one, and the reverse."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import torch

from farspan.call.naming import find_where, format_where
from farspan.record.tensor import LazyTensor
from farspan.torch_private import has_memory_of_its_own, has_weak_references, is_used_below

if TYPE_CHECKING:
    from farspan.graph import Value
    from farspan.record.recording import Recording

__all__ = ["become_plain", "can_be_recorded", "exchange"]


def can_be_recorded(recorder: Recording, plain: torch.Tensor) -> bool:
    """Returns whether a recorded tensor may replace this plain one in the program: alike on every rank."""
    if not (
        type(plain) is torch.Tensor
        and id(plain) not in recorder.placed
        and not plain.requires_grad
        and plain._base is None
        and plain.layout is torch.strided
        and not recorder.copies.holds(plain)
        and not is_used_below(plain)
        and has_memory_of_its_own(plain)
    ):
        return False
    if not has_weak_references(plain):
        return True
    if recorder.cache.num_collected == recorder.cache.num_runs:
        return False
    gc.collect()  # those of a run on fakes, which is a circle, go at another time on each rank
    recorder.cache.num_collected = recorder.cache.num_runs
    return not has_weak_references(plain)


def become_plain(recorder: Recording, lazy: LazyTensor, plain: torch.Tensor) -> None:
    """Let the program hold `plain` where it held `lazy`."""
    exchange(recorder, lazy, plain, lazy._value)


def exchange(recorder: Recording, one: torch.Tensor, other: torch.Tensor, value: Value) -> None:
    """Let who holds `one` hold `other`, and the reverse; one of them is the recorded tensor of `value`."""
    value.lazy = None
    try:
        try:
            torch.utils.swap_tensors(one, other)
        except RuntimeError:
            gc.collect()  # a run on fakes has left a weak reference
            torch.utils.swap_tensors(one, other)
    except RuntimeError as error:
        recorder.refuse(
            "recorded values are written into a plain tensor that the program holds a weak reference to",
            why=f"at {format_where(find_where())}: {str(error).splitlines()[0]}",
            hint="write into a tensor made for it",
        )
    lazy = one if type(one) is LazyTensor else other
    value.lazy = weakref.ref(lazy)
