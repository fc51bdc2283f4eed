"""Grad mode and autocast: part of every call, kept when it is recorded and set again when it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["Modes", "apply_modes", "current_modes"]

Modes = tuple[Any, ...]
_NOTHING = contextlib.nullcontext()
_DEVICE_TYPES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def current_modes() -> Modes:
    """(grad enabled, inference mode, autocast: (device type, dtype, cache enabled) for each that is on)."""
    autocast = tuple(
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
        for kind in _DEVICE_TYPES
        if torch.is_autocast_enabled(kind)
    )
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)


def apply_modes(modes: Modes) -> contextlib.AbstractContextManager[None]:
    """Run the body under `modes`, whatever is on outside."""
    return _NOTHING if modes == current_modes() else _applied(modes)


@contextlib.contextmanager
def _applied(modes: Modes) -> Iterator[None]:
    grad, _, autocast = modes  # inference mode runs as no_grad: its tensors could not be saved or sent later
    wanted = {kind: (dtype, cache) for kind, dtype, cache in autocast}
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(grad))
        for kind in _DEVICE_TYPES:
            if kind in wanted:
                dtype, cache = wanted[kind]
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            elif torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
