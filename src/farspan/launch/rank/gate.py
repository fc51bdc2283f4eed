"""A process that was started ahead of its turn loads what every rank needs, and waits until it is to run the script."""

from __future__ import annotations

import contextlib
import importlib
import os
import posix

from farspan.launch.rank.notes import GATE_VARIABLE

__all__ = ["wait_at_gate"]

_MODULES = (
    "torch",
    "torch._dynamo",  # which making an optimizer loads
    "farspan.api",
    "farspan.place.measured",
    "farspan.state.saving.save",
    "farspan.state.loading.load",
)


def wait_at_gate() -> None:
    """Returns at once in a process whose turn it is."""
    gate = os.environ.pop(GATE_VARIABLE, "")  # of this process alone
    if not gate:
        return
    for name in _MODULES:
        importlib.import_module(name)
    with contextlib.suppress(FileNotFoundError):  # it is open, and has no name any more
        posix.close(posix.open(gate, os.O_RDONLY | os.O_CLOEXEC))
