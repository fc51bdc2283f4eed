"""Captures torch's settings for how operations compute: flags of its backends and the like.

Context managers (`sdpa_kernel`, `torch.backends.cudnn.flags`, `torch.autograd.detect_anomaly`, `torch.device(...)`) and
plain calls (`torch.use_deterministic_algorithms`) set them. They belong to a call: asked of torch when it is recorded,
whoever has set them, and set again where and when it runs.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from farspan.torch_private.flags import FLAGS, default_device

__all__ = ["Settings", "applied_settings", "current_settings"]

_ask: Callable[[Callable[[], Any]], Any] = operator.call
_GETTERS: tuple[Callable[[], Any], ...] = tuple([get for get, _ in FLAGS])


class Settings:
    """All flags as they are at one time; equal ones are one object."""

    __slots__ = ("device", "values")

    def __init__(self, values: tuple[Any, ...], device: torch.device | None) -> None:
        self.values = values
        self.device = device
        """The device on which tensors are made, if the program has said so."""

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


@contextlib.contextmanager
def applied_settings(settings: Settings) -> Iterator[None]:
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
