"""Grad mode, autocast and torch's flags: part of every call, kept when it is recorded and set again when it runs.

In an autocast region torch casts each parameter once and uses the result wherever the region needs it, so that its
gradients are added up in the lower precision. Calls that were recorded in one region and run in one segment share
their casts in the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from farspan.call.torch_settings import applied_settings, current_settings
from farspan.torch_private import autocast_region, in_autocast_region, is_any_autocast_enabled

__all__ = ["Modes", "Regions", "apply_modes", "current_modes", "in_region"]

Modes = tuple[Any, ...]
_NOTHING = contextlib.nullcontext()
_DEVICE_TYPES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def current_modes() -> Modes:
    """(grad enabled, inference mode, autocast: (device type, dtype, cache enabled) for each that is on, flags)."""
    autocast = _current_autocast() if is_any_autocast_enabled() else ()
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, current_settings())


def _current_autocast() -> tuple[Any, ...]:
    return tuple(
        [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in _DEVICE_TYPES
            if torch.is_autocast_enabled(kind)
        ]
    )


class Regions:
    """Knows the autocast region in which each call is recorded, without asking torch where there is none."""

    def __init__(self) -> None:
        self._latest = 0

    def of(self, modes: Modes) -> int:
        """Returns the region that is open now, under `modes`; 0 until there is a call to which autocast applies."""
        if modes[2] or self._latest:
            self._latest = autocast_region()
        return self._latest


def apply_modes(modes: Modes) -> contextlib.AbstractContextManager[None]:
    """Run the body under `modes`, whatever is on outside."""
    return _NOTHING if modes == current_modes() else _applied(modes)


def in_region(region: int) -> contextlib.AbstractContextManager[None]:
    """Run in the body calls that were recorded in one autocast region, with casts of their own."""
    return in_autocast_region() if region else _NOTHING


@contextlib.contextmanager
def _applied(modes: Modes) -> Iterator[None]:
    grad, _, autocast, settings = modes  # inference mode runs as no_grad: its tensors could not be saved or sent later
    wanted = {kind: (dtype, cache) for kind, dtype, cache in autocast}
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(grad))
        if settings is not current_settings():
            stack.enter_context(applied_settings(settings))
        for kind in _DEVICE_TYPES:
            if kind in wanted:
                dtype, cache = wanted[kind]
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            elif torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
