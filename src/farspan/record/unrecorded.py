"""Lets farspan, or what the program has asked of it, use tensors without recording that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from farspan.torch_private import without_modes_of

if TYPE_CHECKING:
    from farspan.record.recording import Recording

__all__ = ["plainly", "unrecorded"]


@contextlib.contextmanager
def unrecorded(recorder: Recording) -> Iterator[None]:
    """Records nothing of the body."""
    was_recording, recorder.is_recording = recorder.is_recording, False
    try:
        yield
    finally:
        recorder.is_recording = was_recording


@contextlib.contextmanager
def plainly(recorder: Recording) -> Iterator[None]:
    """Runs the torch functions in the body for real: none is recorded, nor seen by the recorder's modes."""
    with unrecorded(recorder), without_modes_of(recorder):
        yield
