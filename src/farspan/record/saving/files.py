"""Streams `torch.save` of what other ranks have: each tensor is fetched when its bytes are written, and released after
that."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from farspan.record.saving.reserved import Reserved, reserved_memory
from farspan.record.tensor import LazyTensor, StubParameter
from farspan.torch_private import DisableTorchFunction, address_of_storage, is_wrapped, watch_saving

if TYPE_CHECKING:
    from farspan.record.recording import Recording

__all__ = ["before_pickling", "fetched", "is_fetched_late", "is_saving", "stream_saving"]


class _State(threading.local):
    depth = 0


_state = _State()


def is_saving() -> bool:
    """Returns whether this thread runs `torch.save`, which gets data when it writes them."""
    return _state.depth > 0


def before_pickling(recorder: Recording | None, tensor: torch.Tensor) -> None:
    """Gives a tensor that is about to be pickled its data, up to date, unless they are fetched when they are
    written."""
    if type(tensor) in (LazyTensor, StubParameter):
        return
    reserved = _reserved_of(tensor)
    if reserved is None or reserved.is_filled or not is_saving():
        if recorder is not None and recorder.is_recording:
            recorder.copies.refresh([tensor])
        if reserved is not None and not reserved.is_filled:
            reserved.fill()


def stream_saving() -> None:
    """Let `torch.save` write reserved memory one tensor after the other."""
    watch_saving(_saving, _writing)


@contextlib.contextmanager
def _saving() -> Iterator[None]:
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1


def is_fetched_late(tensor: torch.Tensor) -> bool:
    """Returns whether a plain tensor lies in reserved memory that is not filled."""
    reserved = _reserved_of(tensor)
    return reserved is not None and not reserved.is_filled


def fetched(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Keeps a plain tensor's data in its memory for the body."""
    reserved = _reserved_of(tensor)
    return contextlib.nullcontext() if reserved is None else reserved.filled()


def _reserved_of(tensor: torch.Tensor) -> Reserved | None:
    if not reserved_memory or tensor.layout is not torch.strided or is_wrapped(tensor):
        return None
    with DisableTorchFunction():
        return reserved_memory.get(address_of_storage(tensor.untyped_storage()))


def _writing(storage: Any) -> contextlib.AbstractContextManager[None]:
    reserved = reserved_memory.get(address_of_storage(storage))
    return contextlib.nullcontext() if reserved is None else reserved.filled()
