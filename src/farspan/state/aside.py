"""Lets farspan use the program's tensors itself, without being recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from farspan.execute.engine import Engine
from farspan.torch_private import without_modes_of

__all__ = ["aside"]


@contextlib.contextmanager
def aside(engine: Engine) -> Iterator[None]:
    """Records nothing of the body; what it raises is not reported to other ranks."""
    recorder = engine.recorder
    was_recording, recorder.is_recording = recorder.is_recording, False
    try:
        with without_modes_of(recorder):
            yield
    finally:
        recorder.is_recording = was_recording
