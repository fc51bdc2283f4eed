"""Grad mode, autocast, torch's flags and the hooks on what autograd saves: part of every call, kept when it is recorded
and set again when it runs.

In an autocast region torch casts each parameter once and uses the result wherever the region needs it, so that its
gradients are added up in the lower precision. Calls that were recorded in one region and run in one segment share
their casts in the same way.

Flags say how operations compute. Context managers (`sdpa_kernel`, `torch.backends.cudnn.flags`,
`torch.autograd.detect_anomaly`, `torch.device(...)`) and plain calls (`torch.use_deterministic_algorithms`) set them.
They are asked of torch, whoever has set them.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from farspan.devices import device_types
from farspan.torch_private import autocast_region, in_autocast_region, is_any_autocast_enabled
from farspan.torch_private.flags import FLAGS, default_device, hooks_on_what_is_saved, is_of_a_checkpoint

__all__ = [
    "Modes",
    "Regions",
    "SavedHooks",
    "Settings",
    "apply_autocast",
    "apply_modes",
    "current_modes",
    "current_settings",
    "in_region",
    "saved_hooks",
    "under_saved_hooks",
]

Modes = tuple[Any, ...]
SavedHooks = tuple[Any, Any] | None
"""(pack, unpack)"""
_NOTHING = contextlib.nullcontext()
_ask: Callable[[Callable[[], Any]], Any] = operator.call
_GETTERS: tuple[Callable[[], Any], ...] = tuple([get for get, _ in FLAGS])
_DEVICE_TYPES = device_types()


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
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(grad))
        if settings is not current_settings():
            stack.enter_context(_applied_settings(settings))
        stack.enter_context(apply_autocast(autocast))
        yield


@contextlib.contextmanager
def apply_autocast(autocast: tuple[Any, ...]) -> Iterator[None]:
    """Run the body under autocast as it is in modes, whatever is on outside."""
    wanted = {kind: (dtype, cache) for kind, dtype, cache in autocast}
    with contextlib.ExitStack() as stack:
        for kind in _DEVICE_TYPES:
            if kind in wanted:
                dtype, cache = wanted[kind]
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            elif torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def saved_hooks() -> SavedHooks:
    """Returns the hooks through which autograd keeps what it needs from here on, if the program has set any. Not those
    of a checkpoint: what is called in one is recorded, and not computed again.
    """
    hooks = hooks_on_what_is_saved()
    return None if hooks is None or is_of_a_checkpoint(hooks) else hooks


def under_saved_hooks(hooks: SavedHooks) -> contextlib.AbstractContextManager[Any]:
    """Run the body under `hooks`."""
    return _NOTHING if hooks is None else torch.autograd.graph.saved_tensors_hooks(*hooks)


class Settings:
    """All flags as they are at one time; equal ones are one object."""

    __slots__ = ("device", "values")

    def __init__(self, values: tuple[Any, ...], device: torch.device | None) -> None:
        self.values = values
        self.device = device
        """Where tensors are made, if the program has said so."""

    def __repr__(self) -> str:
        return "settings"  # ranks on other machines may have others, and no flag changes what is to be sent


_known: dict[Any, Settings] = {}
_latest = Settings((), None)


def current_settings() -> Settings:
    """Return the settings of torch that hold in this thread now."""
    global _latest
    values = tuple(map(_ask, _GETTERS))
    device = default_device()
    latest = _latest
    if values == latest.values and device == latest.device:
        return latest
    key = repr((values, device))
    _latest = found = _known.setdefault(key, Settings(values, device))
    return found


def with_device(settings: Settings, device: torch.device) -> Settings:
    """Returns settings under which tensors are made on another device."""
    return _known.setdefault(repr((settings.values, device)), Settings(settings.values, device))


@contextlib.contextmanager
def _applied_settings(settings: Settings) -> Iterator[None]:
    """Run the body under `settings`, whatever is set outside."""
    outside = current_settings()
    changed = [
        (put, wanted, before)
        for (_, put), wanted, before in zip(FLAGS, settings.values, outside.values, strict=True)
        if wanted != before
    ]
    with contextlib.nullcontext() if settings.device == outside.device else torch.device(settings.device or "cpu"):
        for put, wanted, _ in changed:
            put(wanted)
        try:
            yield
        finally:
            for put, _, before in reversed(changed):
                put(before)
